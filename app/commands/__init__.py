"""What each subcommand of ``fairgate`` does. ``app/__main__.py`` reads the command line and calls them."""
