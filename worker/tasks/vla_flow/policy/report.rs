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
    params::{Group, TrainableLayout},
};
use coxswain_task::Module;

use crate::{
    pretrained::part_of,
    vla_flow::{EXPERT, SENSOR},
};

/// Tensors, elements and bytes of a part.
#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    tensors: usize,
    parameters: usize,
    bytes: u64,
}

impl Tally {
    fn add(&mut self, elements: usize, bytes: u64) {
        self.tensors += 1;
        self.parameters += elements;
        self.bytes += bytes;
    }

    fn row(self, module: impl Into<String>, trains: bool, dtype: &'static str) -> Module {
        let Self { tensors, parameters, bytes } = self;
        Module { module: module.into(), tensors, parameters, trains, dtype, bytes }
    }
}

impl<B: Tape<Base = B>> Policy<B> {
    /// Rows of the start-up table: frozen parts first, then what trains.
    pub fn trainable_report(&self, layout: &TrainableLayout, frozen: FrozenDtype) -> Vec<Module> {
        let outline = self.model.outline();
        let mut tensors = outline.tensors();
        let trains = Trains { lora: self.lora(), full: Some(&self.full) };
        tensors.retain(|tensor| trains.group(&tensor.name).is_none());
        let parts = frozen_parts(&tensors, frozen, self.model.in_memory(), self.model.table_place());
        let mut rows: Vec<Module> = parts
            .into_iter()
            .map(|FrozenPart { name, tensors, elements, bytes, dtype }| {
                Tally { tensors, parameters: elements, bytes }.row(name, false, dtype)
            })
            .collect();
        let mut brought: BTreeMap<Group, Tally> = BTreeMap::new();
        for constant in layout.constants() {
            brought.entry(constant.group).or_default().add(constant.len(), 4 * constant.len() as u64);
        }
        rows.extend(brought.into_iter().map(|(group, tally)| tally.row(group.to_string(), false, "float32")));
        let order = [Group::LORA, Group::BASE, EXPERT, SENSOR];
        let place = |group| order.iter().position(|known| *known == group);
        let mut groups: BTreeMap<(Option<usize>, &str), (Group, Tally)> = BTreeMap::new();
        for param in layout.params() {
            let key = (place(param.group), part_of(outline.rules, &param.name));
            let (_, tally) = groups.entry(key).or_insert((param.group, Tally::default()));
            tally.add(param.len(), 4 * param.len() as u64);
        }
        rows.extend(groups.into_iter().map(|((_, part), (group, tally))| {
            let module = if part.is_empty() { group.to_string() } else { format!("{part}.{group}") };
            tally.row(module, true, "float32")
        }));
        rows
    }
}
