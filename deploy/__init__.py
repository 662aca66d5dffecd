"""Starting a cluster: Ray, configuration files, the `conductor` command."""
