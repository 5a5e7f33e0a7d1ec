//! What of the model trains, tensor by tensor and module by module.

use coxswain_nn::{
    lora::{LoraPlan, Module, TrainedModules},
    params::Group,
};

/// What of the model trains: nothing, unless said.
#[derive(Clone, Copy, Debug, Default)]
pub struct Trains<'a> {
    /// Which linears have adapters.
    pub lora: Option<&'a LoraPlan>,
    /// Which modules train in full.
    pub full: Option<&'a TrainedModules>,
}

impl Trains<'_> {
    /// The group in which a tensor of the checkpoint trains, by its name; none if it is frozen.
    pub fn group(&self, tensor: &str) -> Option<Group> {
        if self.full.is_some_and(|full| full.trains(tensor)) {
            return Some(Group::BASE);
        }
        self.lora.filter(|plan| plan.trains_bias(tensor)).map(|_| Group::LORA)
    }

    /// Whether anything of a module trains, its adapter included.
    pub fn touches(&self, module: &Module) -> bool {
        let Module { name, kind, .. } = module;
        let adapted = |plan: &LoraPlan| {
            plan.adapter(name).is_some() || kind.bias().is_some() && plan.trains_bias(&format!("{name}.bias"))
        };
        self.full.is_some_and(|full| full.contains(name)) || self.lora.is_some_and(adapted)
    }
}

impl<'a> From<Option<&'a LoraPlan>> for Trains<'a> {
    /// Adapters, and nothing in full.
    fn from(lora: Option<&'a LoraPlan>) -> Self {
        Self { lora, full: None }
    }
}
