//! Networks that reconstruct trajectories from a few numbers.
//!
//! ```text
//! trajectories [n, layers * dim] ─ encoder ─▶ code ─▶ latent [n, z] ─ decoder ─▶ [n, layers * dim]
//!                                              │
//!   autoencoder, transformer                the latent itself, [n, z]
//!   vae                                     mean and logarithm of the variance, [n, 2 z]: it is drawn
//! ```
//!
//! Encoder and decoder are halves of one kind each (`mlp`, `transformer`).

mod draw;
mod half;
mod mlp;
mod registrar;
mod transformer;

pub use self::{
    draw::Draw,
    half::{Half, HalfRun, HalfTrace},
    registrar::{ADAPTERS, NETWORK},
};
use self::{mlp::MlpHalf, registrar::NetworkRegistrar, transformer::TransformerHalf};

use coxswain_nn::{
    lora::{Lora, LoraError, LoraPlan, Module, ModuleKind},
    params::TrainableLayout,
};

use super::{
    config::{NetworkLora, NetworkSettings, NetworkType},
    extractor::TrajectoryShape,
};

/// Both halves.
#[derive(Clone, Debug)]
pub struct Network {
    /// Trajectories to codes.
    pub encoder: Half,
    /// Latents to trajectories.
    pub decoder: Half,
    /// Numbers of a latent, where it is drawn.
    pub drawn: Option<usize>,
}

impl Network {
    /// Registers the network of a run: all of it to train, or, with a plan, as constants with adapters.
    pub fn register(
        layout: &mut TrainableLayout,
        settings: &NetworkSettings,
        shape: &TrajectoryShape,
        plan: Option<&LoraPlan>,
    ) -> Self {
        let drawn = (settings.kind == NetworkType::Vae).then_some(settings.latent_dim);
        let code = settings.latent_dim * if drawn.is_some() { 2 } else { 1 };
        let (hidden, latent) = (settings.hidden_dim, settings.latent_dim);
        let mut registrar = NetworkRegistrar { layout, plan };
        let [encoder, decoder] = match settings.kind {
            NetworkType::Autoencoder | NetworkType::Vae => {
                let between = vec![hidden; settings.num_layers - 1];
                let widths = |from, to| [vec![from], between.clone(), vec![to]].concat();
                let encoder = MlpHalf::register(&mut registrar, "encoder", &widths(shape.width(), code));
                let decoder = MlpHalf::register(&mut registrar, "decoder", &widths(latent, shape.width()));
                [encoder, decoder].map(Half::Mlp)
            }
            NetworkType::Transformer => {
                let of = transformer::Shape::from_settings(settings, shape);
                let encoder = TransformerHalf::encoder(&mut registrar, of, latent);
                let decoder = TransformerHalf::decoder(&mut registrar, of, latent);
                [encoder, decoder].map(|half| Half::Transformer(Box::new(half)))
            }
        };
        Self { encoder, decoder, drawn }
    }

    /// Where a run's adapters go; none if it has none.
    pub fn plan(
        lora: Option<&NetworkLora>,
        settings: &NetworkSettings,
        shape: &TrajectoryShape,
    ) -> Result<Option<LoraPlan>, LoraError> {
        let plan = lora.map(|lora| LoraPlan::resolve(&Lora::from(lora), &modules(settings, shape)));
        plan.transpose()
    }
}

/// The linears of a network.
fn modules(settings: &NetworkSettings, shape: &TrajectoryShape) -> Vec<Module> {
    let mut layout = TrainableLayout::default();
    Network::register(&mut layout, settings, shape, None);
    let linears = layout.params().iter().filter_map(|param| {
        let (name, &[outputs, inputs]) = (param.name.strip_suffix(".weight")?, &*param.shape) else {
            return None;
        };
        let kind = ModuleKind::Linear { inputs, outputs, bias: false, head: false };
        Some(Module { name: name.into(), old_name: name.into(), kind })
    });
    linears.collect()
}
