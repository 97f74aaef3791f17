"""`python -m dilocox_peer`: the same as `dilocox-peer`, where the script is not on the PATH."""

from dilocox_peer.cli.main import main

if __name__ == "__main__":
    main()
