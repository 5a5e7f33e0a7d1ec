//! The task's keys of a run that a data set is opened for.

use coxswain_data::DataError;
use coxswain_proto::run_spec::RunSpec;

use crate::vla_flow::config::VlaSettings;

/// They have been checked, unless the specification did not come through the engine; then they are refused.
pub(super) fn of(spec: &RunSpec) -> Result<VlaSettings, DataError> {
    VlaSettings::of(spec).map_err(|error| DataError::Invalid {
        path: "the run's specification".into(),
        field: "task".into(),
        found: error.to_string(),
        remedy: "read it from a run file, or check it against the task's schema".into(),
    })
}
