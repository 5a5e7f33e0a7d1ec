//! Which positions of the sample order belong to which step and rank: pure integer arithmetic, shared by coordinator and workers.
