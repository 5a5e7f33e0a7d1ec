//! From a YAML file and dotted overrides to a checked [`RunSpec`](crate::run_spec::RunSpec).
