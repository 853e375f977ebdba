"""Files for applications: Frigate, C++ header, runner.pyz."""
