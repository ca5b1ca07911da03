"""The processes on a mesh's hosts: agent, zygote, ranks. Never imports the controller's side."""
