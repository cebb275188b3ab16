"""The forward pass on a CPU by OpenVINO: our decoder as its graph, its paged attention over our block tables.

Nothing outside this package imports `openvino`.
"""
