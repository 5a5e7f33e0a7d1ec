//! A generation's adapter as the store keeps it, and back.

use std::borrow::Cow;

use crate::{
    model::policy::{AdapterSnapshot, SnapshotError},
    params::TrainableLayout,
    vl_cache::AdapterTensor,
};

/// As the store names and keeps it; nothing is copied.
pub(super) fn tensors(adapter: &AdapterSnapshot) -> Vec<AdapterTensor<'_>> {
    let tensor = |(name, shape, values)| AdapterTensor {
        name: Cow::Borrowed(name),
        shape: Cow::Borrowed(shape),
        values: Cow::Borrowed(values),
    };
    adapter.tensors().map(tensor).collect()
}

/// What the store kept, for a run of this layout.
pub(super) fn snapshot(
    layout: &TrainableLayout,
    tensors: &[AdapterTensor<'_>],
) -> Result<AdapterSnapshot, SnapshotError> {
    let find = |name: &str| tensors.iter().find(|tensor| tensor.name == name);
    AdapterSnapshot::from_tensors(layout, |name| find(name).map(|t| (&*t.shape, &*t.values)))
}
