"""The questions that are asked. Each part returns plain data for the report, the JSON file and the plots."""
