"""Run the ``penstock`` command with ``python -m penstock``."""

from penstock.cli.main import main

raise SystemExit(main())
