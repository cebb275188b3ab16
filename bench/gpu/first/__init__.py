"""`python -m bench.gpu first`: what a machine with a GPU, rented by the minute, has to show, most important first."""
