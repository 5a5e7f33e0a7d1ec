//! Where a network's tensors come to be: among what trains, or among constants with adapters beside them.

use coxswain_nn::{
    dense::{Dense, DenseShape},
    lora::LoraPlan,
    params::{Group, Init, ParamId, TrainableLayout},
};

/// The network, where it trains; `optimizer.lr.network` is its rate.
pub const NETWORK: Group = Group("network");
/// Adapters; `optimizer.lr.lora` is theirs.
pub const ADAPTERS: Group = Group::LORA;

/// Registers a network's tensors below `network.`.
pub(super) struct NetworkRegistrar<'a> {
    pub layout: &'a mut TrainableLayout,
    /// With one the network does not train itself.
    pub plan: Option<&'a LoraPlan>,
}

impl NetworkRegistrar<'_> {
    /// A linear layer.
    pub fn dense(&mut self, name: &str, shape: DenseShape) -> Dense {
        let name = format!("{NETWORK}.{name}");
        match self.plan {
            Some(plan) => Dense::register_adapted(self.layout, NETWORK, &name, shape, plan),
            None => Dense::register(self.layout, NETWORK, &name, shape),
        }
    }

    /// A table of vectors, drawn small.
    pub fn table(&mut self, name: &str, shape: [usize; 2]) -> ParamId {
        let name = format!("{NETWORK}.{name}");
        match self.plan {
            Some(_) => self.layout.add_constant(name, &shape, NETWORK),
            None => self.layout.add(name, &shape, NETWORK, false, Init::Normal(0.02)),
        }
    }
}
