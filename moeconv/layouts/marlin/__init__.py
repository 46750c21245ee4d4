"""FP4 experts for the Marlin kernels of vLLM and SGLang: a row an engine and source (`rows`)."""
