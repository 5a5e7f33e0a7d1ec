//! What of the policy is frozen and what trains.

use std::collections::BTreeMap;

use coxswain_nn::dtypes::FrozenDtype;

use super::Policy;
use coxswain_models::pretrained::{
    frozen::{FrozenPart, frozen_parts},
    trains::Trains,
};
use coxswain_nn::{
    kernels::Tape,
    params::{Group, ParamSpec, TrainableLayout},
};
use coxswain_task::Module;

use crate::{
    pretrained::part_of,
    vla_flow::{EXPERT, SENSOR},
};

impl<B: Tape<Base = B>> Policy<B> {
    /// Rows of the start-up table: frozen parts first, then what trains.
    pub fn trainable_report(&self, layout: &TrainableLayout, frozen: FrozenDtype) -> Vec<Module> {
        let outline = self.model.outline();
        let mut tensors = outline.tensors();
        let trains = Trains { lora: self.lora(), full: Some(&self.full) };
        tensors.retain(|tensor| trains.group(&tensor.name).is_none());
        let parts = frozen_parts(&tensors, frozen, self.model.in_memory(), self.model.table_place());
        let frozen = parts.into_iter().map(|part| {
            let FrozenPart { name, tensors, elements: parameters, bytes, dtype } = part;
            Module { module: name.into(), tensors, parameters, trains: false, dtype, bytes }
        });
        let mut rows: Vec<Module> = frozen.collect();
        let mut brought: BTreeMap<Group, Vec<&ParamSpec>> = BTreeMap::new();
        for constant in layout.constants() {
            brought.entry(constant.group).or_default().push(constant);
        }
        let brought = brought.iter().map(|(group, of)| Module::of_params(group.to_string(), false, of));
        rows.extend(brought);
        let order = [Group::LORA, Group::BASE, EXPERT, SENSOR];
        let place = |group| order.iter().position(|known| *known == group);
        let mut groups: BTreeMap<(Option<usize>, &str), Vec<&ParamSpec>> = BTreeMap::new();
        for param in layout.params() {
            let key = (place(param.group), part_of(outline.rules, &param.name));
            groups.entry(key).or_default().push(param);
        }
        rows.extend(groups.iter().map(|((_, part), of)| {
            let group = of[0].group;
            let module = if part.is_empty() { group.to_string() } else { format!("{part}.{group}") };
            Module::of_params(module, true, of)
        }));
        rows
    }
}
