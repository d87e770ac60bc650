"""vLLM without packages that tests and machines may lack, and what its steps take."""
