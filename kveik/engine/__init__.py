"""Engine: steps (plan, run, settle, record), the thread that runs them, streams, executor and the offline LLM."""
