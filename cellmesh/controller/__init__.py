"""The notebook's side: meshes, runs, output. Never imports the workers' side."""
