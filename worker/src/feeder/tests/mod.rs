//! The feeder on the samples of a real task.

mod kept;
mod pipeline;

use std::sync::Arc;

use coxswain_feature_store::Store;
use coxswain_models::families::shelf;
use coxswain_task::{SampleKeys, Samples};
use coxswain_tasks::vla_flow::{
    data::Dataset,
    testing::{mini, spec},
};

/// The data set that ships with the repository.
pub(super) fn dataset() -> Arc<Dataset> {
    Arc::new(Dataset::from_spec(&spec(&mini()), shelf()).expect("the data set opens"))
}

/// The keys of its samples, with nothing remembered.
pub(super) fn keys(dataset: &Dataset) -> Arc<SampleKeys> {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let store = Store::open(dir.path(), None).expect("a new store");
    Arc::new(dataset.keys(&store).expect("readable"))
}
