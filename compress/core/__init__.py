"""What every room uses: errors, files, settings, progress, artifacts, memory, sandboxes."""
