"""Files for applications: Frigate, runner.pyz."""
