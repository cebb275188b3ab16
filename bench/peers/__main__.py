"""python -m bench.peers lists the installed peers; python -m bench.peers install NAME creates a peer's environment."""

import argparse
import sys

from bench.peers.catalog import KINDS


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description="Environments of the peers.")
    commands = parser.add_subparsers(dest="command")
    install = commands.add_parser("install", help="create or update the environments of these peers")
    install.add_argument("names", nargs="+", choices=list(KINDS), metavar="NAME", help=", ".join(KINDS))
    options = parser.parse_args(arguments)
    for name in options.names if options.command == "install" else ():
        KINDS[name].install()
    for kind in KINDS.values():
        print(f"{kind.name:20} {kind.version() if kind.is_installed else 'not installed'}")


if __name__ == "__main__":
    main(sys.argv[1:])
