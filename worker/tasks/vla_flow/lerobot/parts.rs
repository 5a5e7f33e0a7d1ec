//! What of a policy is frozen and what trains, as tables and predictions have it.

use coxswain_models::pretrained::{
    adapters::TunedModules,
    frozen::{FrozenTensor, frozen_tensors},
    rules::Place,
};
use coxswain_nn::{
    dtypes::FrozenDtype,
    params::{Group, TrainableLayout},
};
use coxswain_task::Module;

use crate::vla_flow::{EXPERT, base::PolicyBase, config::VlaSettings};

/// The frozen tensors that training loads of a policy.
pub fn frozen(base: &PolicyBase, tuned: &TunedModules) -> Vec<FrozenTensor> {
    let mut tensors = frozen_tensors(base.kind.rules(), &base.modules());
    tensors.retain(|tensor| tuned.trains().group(&tensor.name).is_none());
    tensors
}

/// Rows of the start-up table: frozen parts first, then what trains.
pub fn rows(frozen: &[FrozenTensor], dtype: FrozenDtype, layout: &TrainableLayout) -> Vec<Module> {
    let of_expert = |tensor: &&FrozenTensor| tensor.place == Place::Other;
    let row = |module: &str, tensors: Vec<&FrozenTensor>| Module {
        module: module.into(),
        tensors: tensors.len(),
        parameters: tensors.iter().map(|tensor| tensor.elements).sum(),
        trains: false,
        dtype: dtype.name(),
        bytes: tensors.iter().map(|tensor| tensor.kept_bytes(dtype)).sum(),
    };
    let (expert, backbone): (Vec<_>, Vec<_>) = frozen.iter().partition(of_expert);
    let mut rows = vec![row("backbone", backbone), row("expert", expert)];
    for group in [Group::LORA, Group::BASE, EXPERT] {
        let params: Vec<_> = layout.params().iter().filter(|param| param.group == group).collect();
        let parameters = params.iter().map(|param| param.len()).sum();
        let (module, bytes) = (group.to_string(), 4 * parameters as u64);
        let tensors = params.len();
        rows.push(Module { module, tensors, parameters, trains: true, dtype: "float32", bytes });
    }
    rows.retain(|row| row.tensors > 0);
    rows
}

/// Whether adapters drop anything.
pub(super) fn drops(settings: &VlaSettings) -> bool {
    settings.lora.as_ref().is_some_and(|lora| lora.dropout > 0.0)
}
