"""The coordinator: who takes part, who trains what, and how far training is; a process of its own, on no learner."""
