"""`python -m bench.gpu first`: what to know about a new GPU machine, rented by the minute, most important first."""
