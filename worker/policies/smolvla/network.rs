//! A SmolVLA policy on a device: read from its directory, run forward and back, and asked for velocities.

use std::{cell::Cell, path::Path, sync::Arc};

use burn::{backend::Flex, tensor::Tensor};
use coxswain_models::{
    Shelf,
    joint::{JointModel, LayerSource, StreamLayer},
    pretrained::{
        adapters::Tuned,
        blocks::BlockWeights,
        checkpoint::{Checkpoint, CheckpointDir},
        error::{ModelError, TokenError},
        loader::{Loader, check_dtype},
        prompts::Prompts,
        rules::{Place, Rules},
        trains::Trains,
    },
};
use coxswain_nn::{
    dtypes::FrozenDtype,
    kernels::{Tape, precision},
    lora::{LoraLinear, TrainedModules, linear::LinearWeight},
    memory,
    params::{BaseWeight, GradientSums, Init, ParamId, ParamScope, TrainableLayout, Trainables},
    recompute::segment::{Input, Recorded, Segment},
};
use coxswain_proto::run_spec::Recompute;

use super::{
    config::{EXPERT_AT, OF_VLM, SmolVlaConfig},
    ends::{ActionSegment, Ends, StateSegment, VelocitySegment, sinusoids},
    layer::{LayerSegment, PairedLayer, Suffix},
    prefix::Prefix,
    rotary::{Masks, Rotary, placed},
};
use crate::{directory::PolicyDirectory, groups::EXPERT};

/// What names in a SmolVLA policy's file mean: they are LeRobot's own.
pub const RULES: Rules =
    Rules { canonical: str::to_owned, place, packs: |module| module.contains(".text_model.layers.") };

fn place(name: &str) -> Place {
    let Some(name) = name.strip_prefix(OF_VLM) else { return Place::Other };
    if name.starts_with("model.vision_model.") || name.starts_with("model.connector.") {
        return Place::Vision(Place::number(name, "model.vision_model.encoder.layers."));
    }
    if let Some(layer) = Place::number(name, "model.text_model.layers.") {
        return Place::Layer(layer);
    }
    match name {
        "model.text_model.embed_tokens.weight" => Place::Table,
        "model.text_model.norm.weight" => Place::FinalNorm,
        "lm_head.weight" => Place::Head,
        _ => Place::Other,
    }
}

/// A policy: frozen weights, and where its trainables lie in the flat parameter buffer.
pub struct SmolVla<B: Tape<Base = B>> {
    /// Its configuration.
    pub config: SmolVlaConfig,
    vlm: Box<dyn JointModel<B>>,
    expert: Vec<StreamLayer<B>>,
    ends: Ends<B>,
    device: B::Device,
}

/// The files of a policy, and how they are read.
#[derive(Clone, Copy, Debug)]
pub struct PolicyFiles<'f> {
    /// The policy's own.
    pub directory: &'f PolicyDirectory,
    /// The directory of its vision-language model, for `config.json` alone.
    pub backbone: &'f Path,
    /// How frozen weights are kept.
    pub dtype: FrozenDtype,
}

/// What a policy sees of a micro-batch.
#[derive(Clone, Copy, Debug)]
pub struct Observed<'b> {
    /// Images and prompts.
    pub prompts: Prompts<'b>,
    /// The id that stands for a token of an image.
    pub image: u32,
    /// Normalised states, `[b, padded]`.
    pub state: &'b [f32],
}

/// Actions on their way along the flow.
#[derive(Clone, Copy, Debug)]
pub struct Draws<'d> {
    /// Of each sample, `[b]`.
    pub times: &'d [f32],
    /// `[b, chunk, padded]`.
    pub noisy: &'d [f32],
}

/// What a forward pass kept.
pub struct Trace<'a, B: Tape<Base = B>> {
    prefix: Prefix<B>,
    suffix: Suffix<B>,
    state: Recorded<'a, B>,
    actions: Recorded<'a, B>,
    layers: Vec<KeptLayer<'a, B>>,
    velocity: Recorded<'a, B>,
}

/// Of a layer its graph, or what it is made of again.
enum KeptLayer<'a, B: Tape<Base = B>> {
    Graph(Recorded<'a, B>),
    Inputs(Tensor<B, 2>),
}

impl<B: Tape<Base = B>> SmolVla<B> {
    /// Reads a policy. What LeRobot trains by default is registered in `layout`, under the file's names.
    pub fn load(
        files: PolicyFiles<'_>,
        models: Shelf<B>,
        layout: &mut TrainableLayout,
        device: &B::Device,
    ) -> Result<Self, ModelError> {
        let PolicyFiles { directory, backbone, dtype } = files;
        let config = SmolVlaConfig::of(directory)?;
        let family = models.joint.of(backbone)?;
        let within = config.within();
        let dir = &directory.dir;
        let checkpoint =
            &Arc::new(if B::VALUES { Checkpoint::open(dir, RULES)? } else { Checkpoint::hollow(dir, RULES) });
        if B::VALUES {
            check_dtype::<B>(dtype)?;
            precision::follow(dtype.dense());
        }
        let inner = expert_inner(dir);
        let (trains, in_flight, blocks) = (Trains::default(), Cell::default(), BlockWeights::Held);
        let mut loader = Loader { checkpoint, dtype, blocks, trains, layout, device, in_flight };
        let vlm = family.load(backbone, within, &mut loader)?;
        let shape = vlm.outline().layer;
        let mut source = ExpertSource { loader: &mut loader, state_trains: config.state_trains };
        let expert = (0..vlm.outline().layers).map(|number| {
            let at = format!("{EXPERT_AT}.layers.{number}");
            StreamLayer::load(&mut source, &at, config.expert(&shape, number, inner))
        });
        let expert = expert.collect::<Result<Vec<_>, _>>()?;
        let e = config.expert(&shape, 0, inner).width;
        let ends = Ends::load(&mut source, &config, [shape.width, e], shape.eps)?;
        Ok(Self { config, vlm, expert, ends, device: device.clone() })
    }

    /// Predicts velocities, `[b * chunk, padded]`, keeping what `recompute` says for one backward pass.
    pub fn forward<'a>(
        &'a self,
        trainables: &'a Trainables<B>,
        recompute: Recompute,
        observed: Observed<'_>,
        draws: Draws<'_>,
    ) -> Result<(Tensor<B, 2>, Trace<'a, B>), TokenError> {
        let prefix = self.prefix(trainables, observed)?;
        let suffix = self.suffix(&prefix);
        let state = Recorded::run(&self.state_segment(observed), trainables, vec![]);
        let actions = Recorded::run(&self.action_segment(&suffix, draws), trainables, vec![]);
        let rows = |x: Tensor<B, 2>| {
            let values = x.shape().num_elements() / suffix.batch;
            x.reshape([suffix.batch, values])
        };
        let mut x = Tensor::cat(vec![state.output(), rows(actions.output())], 1);
        let mut layers = Vec::with_capacity(self.expert.len());
        for (number, known) in prefix.layers.iter().enumerate() {
            memory::check();
            let segment = LayerSegment { layer: self.layer(number), suffix: &suffix, known };
            let kept = match recompute {
                Recompute::None => {
                    let graph = Recorded::run(&segment, trainables, vec![Input::tracked(x)]);
                    x = graph.output();
                    KeptLayer::Graph(graph)
                }
                _ => {
                    let params = ParamScope::<B>::frozen(trainables);
                    let out = segment.run(&params, &[x.clone()]);
                    KeptLayer::Inputs(std::mem::replace(&mut x, out))
                }
            };
            layers.push(kept);
        }
        let x = x.reshape([suffix.batch * suffix.chunk, self.expert_width()]);
        let velocity = Recorded::run(&VelocitySegment(&self.ends), trainables, vec![Input::tracked(x)]);
        Ok((velocity.output(), Trace { prefix, suffix, state, actions, layers, velocity }))
    }

    /// Carries the gradient of the velocities back; parameter gradients are added to `grads`.
    pub fn backward<'a>(
        &'a self,
        trainables: &'a Trainables<B>,
        trace: Trace<'a, B>,
        dv_nc: Tensor<B, 2>,
        grads: &mut dyn GradientSums<B>,
    ) {
        let Trace { prefix, suffix, state, actions, layers, velocity } = trace;
        let Some(dx) = only(velocity.backward(dv_nc, grads)) else { return };
        let (b, c, e, d) = (suffix.batch, suffix.chunk, self.expert_width(), self.vlm.outline().layer.width);
        let mut dx = dx.reshape([b, c * e]);
        for (number, kept) in layers.into_iter().enumerate().rev() {
            memory::check();
            let graph = match kept {
                KeptLayer::Graph(graph) => graph,
                KeptLayer::Inputs(x) => {
                    let known = &prefix.layers[number];
                    let segment = LayerSegment { layer: self.layer(number), suffix: &suffix, known };
                    Recorded::run(&segment, trainables, vec![Input::tracked(x)])
                }
            };
            match only(graph.backward(dx, grads)) {
                Some(below) => dx = below,
                None => return,
            }
        }
        if self.ends.state_trains() {
            state.backward(dx.clone().narrow(1, 0, d), grads);
        }
        actions.backward(dx.narrow(1, d, c * e).reshape([b * c, e]), grads);
    }

    /// A function that predicts velocities without a tape, for sampling: prefix and state are run here,
    /// once.
    pub fn velocity<'a>(
        &'a self,
        trainables: &'a Trainables<B>,
        observed: Observed<'_>,
    ) -> Result<impl Fn(Draws<'_>) -> Tensor<B, 2> + 'a, TokenError> {
        let prefix = self.prefix(trainables, observed)?;
        let suffix = self.suffix(&prefix);
        let params = ParamScope::<B>::frozen(trainables);
        let mut s_bd = Some(self.state_segment(observed).run(&params, &[]));
        let mut read = Vec::with_capacity(self.expert.len());
        for (number, known) in prefix.layers.iter().enumerate() {
            let Some(state) = s_bd.take() else { break };
            let layer = self.layer(number);
            let (next, keys_values) = layer.state(&params, &suffix, known, state);
            read.push(layer.read(&params, keys_values));
            s_bd = next;
        }
        Ok(move |draws: Draws<'_>| {
            let params = ParamScope::<B>::frozen(trainables);
            let a_ne = self.action_segment(&suffix, draws).run(&params, &[]);
            let a_ne = read.iter().enumerate().fold(a_ne, |a_ne, (number, read)| {
                self.layer(number).actions(&params, &suffix, read.clone(), a_ne)
            });
            VelocitySegment(&self.ends).run(&params, &[a_ne])
        })
    }

    fn layer(&self, number: usize) -> PairedLayer<'_, B> {
        PairedLayer {
            vlm: &self.vlm.layers()[number],
            expert: &self.expert[number],
            joint: self.config.is_joint(number),
            last: number + 1 == self.expert.len(),
        }
    }

    fn expert_width(&self) -> usize {
        self.expert.first().map_or(0, |layer| layer.shape.width)
    }

    fn prefix(&self, trainables: &Trainables<B>, observed: Observed<'_>) -> Result<Prefix<B>, TokenError> {
        Prefix::run(&*self.vlm, trainables, observed.prompts, observed.image, &self.device)
    }

    fn suffix(&self, prefix: &Prefix<B>) -> Suffix<B> {
        let (batch, chunk, device) = (prefix.valid.len(), self.config.chunk, &self.device);
        let head_dim = self.vlm.outline().layer.head_dim;
        let lengths: Vec<u32> = prefix.valid.iter().map(|row| row.len() as u32).collect();
        let behind = lengths.iter().flat_map(|length| (1..=chunk as u32).map(move |place| length + place));
        let alone = (0..batch).flat_map(|_| 0..chunk as u32);
        let rotary = |positions: Vec<u32>| Rotary::new(&positions, batch, head_dim, device);
        Suffix {
            batch,
            chunk,
            behind: rotary(behind.collect()),
            alone: rotary(alone.collect()),
            state: rotary(lengths),
            masks: Masks::new(&prefix.valid, prefix.seq, chunk, device),
        }
    }

    fn state_segment(&self, observed: Observed<'_>) -> StateSegment<'_, B> {
        let width = self.config.padded[0];
        let shape = [observed.state.len() / width, width];
        StateSegment { ends: &self.ends, state_bc: placed(observed.state.to_vec(), shape, &self.device) }
    }

    fn action_segment(&self, suffix: &Suffix<B>, draws: Draws<'_>) -> ActionSegment<'_, B> {
        let (rows, e) = (suffix.batch * suffix.chunk, self.expert_width());
        let row = |time: &f32| sinusoids(*time, e, self.config.periods).repeat(suffix.chunk);
        ActionSegment {
            ends: &self.ends,
            noisy_nc: placed(draws.noisy.to_vec(), [rows, self.config.padded[1]], &self.device),
            sinusoids_ne: placed(draws.times.iter().flat_map(row).collect(), [rows, e], &self.device),
        }
    }
}

/// What everything that trains of the policy in `dir` starts from: what its file has.
pub fn initial_values(dir: &Path, layout: &TrainableLayout) -> Result<Vec<f32>, ModelError> {
    let tuned = Tuned { adapters: None, full: TrainedModules::default() };
    let checkpoint = CheckpointDir { path: dir, rules: RULES };
    tuned.initial_values::<Flex>(0, layout, checkpoint, FrozenDtype::Float32)
}

/// Width of the expert's MLP, which no key says: by the header of the weights. Plans are made without them,
/// too.
fn expert_inner(dir: &Path) -> Option<usize> {
    let gate = format!("{EXPERT_AT}.layers.0.mlp.gate_proj.weight");
    let checkpoint = Checkpoint::open(dir, RULES).ok()?;
    checkpoint.stored(&gate).ok()?.1.first().copied()
}

/// The gradient of a segment's only input.
fn only<B: Tape<Base = B>>(gradients: Vec<Option<Tensor<B, 2>>>) -> Option<Tensor<B, 2>> {
    gradients.into_iter().next().flatten()
}

/// The expert's weights: they train, in the group of action experts, under the names of the file.
struct ExpertSource<'l, 'a, B: Tape<Base = B>> {
    loader: &'l mut Loader<'a, B>,
    state_trains: bool,
}

impl<B: Tape<Base = B>> ExpertSource<'_, '_, B> {
    fn trained(&mut self, name: String, shape: &[usize]) -> ParamId {
        self.loader.layout.add(name, shape, EXPERT, shape.len() > 1, Init::Pretrained)
    }
}

impl<B: Tape<Base = B>> LayerSource<B> for ExpertSource<'_, '_, B> {
    fn linear(
        &mut self,
        module: &str,
        [inputs, outputs]: [usize; 2],
        bias: bool,
    ) -> Result<LoraLinear<B>, ModelError> {
        if module == "model.state_proj" && !self.state_trains {
            return self.loader.linear(module, [inputs, outputs], bias);
        }
        let weight = LinearWeight::Trained(self.trained(format!("{module}.weight"), &[outputs, inputs]));
        let bias = bias.then(|| BaseWeight::Trained(self.trained(format!("{module}.bias"), &[outputs])));
        Ok(LoraLinear::new(weight, bias, None))
    }

    fn gain(&mut self, name: &str, len: usize) -> Result<BaseWeight<B, 1>, ModelError> {
        Ok(BaseWeight::Trained(self.trained(name.into(), &[len])))
    }
}
