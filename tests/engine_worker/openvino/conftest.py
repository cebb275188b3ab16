from importlib.util import find_spec

# The package is optional.
collect_ignore_glob = [] if find_spec("openvino") else ["test_*.py"]
