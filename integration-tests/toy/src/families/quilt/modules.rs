//! All named modules, known from sizes alone, in the order in which what trains of them is registered.

use coxswain_models::pretrained::loader::LinearShape;
use coxswain_nn::lora::{Module, ModuleKind};

use super::{
    block::parts,
    config::Config,
    rules::{self, HEAD, NORM, PATCHES, TABLE},
};

/// All named modules.
pub fn modules(config: &Config) -> Vec<Module> {
    let (width, rows) = (config.hidden_size, config.vocab_size);
    let mut modules =
        vec![linear(patches(config)), module(TABLE, ModuleKind::Embedding { rows, width, tied: false })];
    for index in 0..config.layers {
        let block = parts(config, index);
        let norms = block.norms.iter().map(|(gain, _)| gain.trim_end_matches(".weight"));
        modules.extend(norms.map(|norm| module(norm, ModuleKind::Norm { width, bias: false })));
        modules.extend(block.linears.into_iter().map(linear));
    }
    modules.push(module(NORM, ModuleKind::Norm { width, bias: false }));
    modules.push(module(HEAD, ModuleKind::Linear { inputs: width, outputs: rows, bias: false, head: true }));
    modules
}

/// The linear from pixels of a patch to a token.
pub fn patches(config: &Config) -> LinearShape {
    let features = [config.patch_values(), config.hidden_size];
    LinearShape { module: PATCHES.into(), features, bias: true }
}

fn linear(shape: LinearShape) -> Module {
    let LinearShape { module: name, features: [inputs, outputs], bias } = shape;
    module(&name, ModuleKind::Linear { inputs, outputs, bias, head: false })
}

fn module(name: &str, kind: ModuleKind) -> Module {
    Module { name: name.into(), old_name: rules::stored(name), kind }
}
