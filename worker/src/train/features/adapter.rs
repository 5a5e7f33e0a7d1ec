//! The adapter that a generation's features are made with: its values at one step, as the store keeps it, and
//! back.

use std::borrow::Cow;

use coxswain_feature_store::AdapterTensor;
use coxswain_nn::{
    kernels::ModelBackend,
    params::{Group, TrainableLayout, Trainables},
};

/// A saved snapshot of other adapters than this run's.
#[derive(Debug, thiserror::Error)]
#[error("`{name}` is {found}; this run's adapters have {expected:?} there")]
pub struct SnapshotError {
    /// The tensor.
    pub name: String,
    /// What the snapshot has.
    pub found: String,
    /// This run's shape.
    pub expected: Vec<usize>,
}

/// The values of all adapters at one moment.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterSnapshot {
    /// The adapters alone, where they are in the run's own layout.
    layout: TrainableLayout,
    values: Vec<f32>,
}

impl AdapterSnapshot {
    /// As they are now. Empty without adapters.
    pub fn from_trainables<B: ModelBackend>(trainables: &Trainables<B>, group: Group) -> Self {
        let layout = trainables.layout().leading(group);
        let values = trainables.leading_values(layout.len());
        Self { layout, values }
    }

    /// Trainables that hold these adapters and nothing else: enough for
    /// [`Extractor::compute`](coxswain_task::Extractor::compute).
    pub fn trainables<B: ModelBackend>(&self, device: &B::Device) -> Trainables<B> {
        Trainables::new(self.layout.clone(), self.values.clone(), device)
    }

    /// Name, shape and values of each matrix, under PEFT's names.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &[usize], &[f32])> {
        let params = self.layout.params().iter();
        params.map(|param| (&*param.name, &*param.shape, &self.values[param.range()]))
    }

    /// What [`AdapterSnapshot::tensors`] gave, for a run of this layout: shape and values of each matrix by
    /// its name.
    pub fn from_tensors<'a>(
        layout: &TrainableLayout,
        group: Group,
        find: impl Fn(&str) -> Option<(&'a [usize], &'a [f32])>,
    ) -> Result<Self, SnapshotError> {
        let layout = layout.leading(group);
        let mut values = Vec::with_capacity(layout.len());
        for param in layout.params() {
            let found = find(&param.name);
            match found {
                Some((shape, own)) if shape == param.shape => values.extend_from_slice(own),
                _ => {
                    return Err(SnapshotError {
                        name: param.name.clone(),
                        found: found.map_or("missing".into(), |(shape, _)| format!("{shape:?}")),
                        expected: param.shape.clone(),
                    });
                }
            }
        }
        Ok(Self { layout, values })
    }

    /// Bytes that it takes.
    pub fn bytes(&self) -> u64 {
        std::mem::size_of_val(&*self.values) as u64
    }
}

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
    group: Group,
    tensors: &[AdapterTensor<'_>],
) -> Result<AdapterSnapshot, SnapshotError> {
    let find = |name: &str| tensors.iter().find(|tensor| tensor.name == name);
    AdapterSnapshot::from_tensors(layout, group, |name| find(name).map(|t| (&*t.shape, &*t.values)))
}
