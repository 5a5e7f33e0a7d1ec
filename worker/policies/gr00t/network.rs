//! Such a policy on a device: its vision-language model up to the last layer that is there, and its head.
//!
//! Where the vision-language model trains, its forward pass runs again in the backward pass, which keeps
//! what `train.recompute` says of it then; while it is frozen, as by default, it runs once.

use std::{cell::Cell, ops::Range, sync::Arc};

use burn::tensor::{Int, Tensor, TensorData};
use coxswain_models::{
    pretrained::{
        blocks::BlockWeights,
        checkpoint::Checkpoint,
        error::ModelError,
        loader::{Loader, check_dtype},
        prompts::{DropoutKeys, Prompts},
    },
    vision_language::{KeptInput, PassError, Tap, VisionLanguage, VlPass, VlRun},
};
use coxswain_nn::{
    kernels::{
        AttentionMask, DropoutRows, Tape,
        dropout::{row_word, sample_word},
        precision,
    },
    params::{GradientSums, ParamScope, Trainables},
    recompute::{Retention, segment::Input},
};
use coxswain_proto::run_spec::Recompute;

use super::{
    block::BlockRows,
    config::Gr00tConfig,
    head::{ActionHead, HeadInputs, HeadRows},
    names::{RULES, is_reached, within},
};
use crate::{
    batch::{Draws, PolicyObservation, Training},
    kept_tokens::KeptTokens,
    network::PolicyLoad,
    policy::{BackwardPass, Policy, PolicyFiles, PolicySizes, Velocity},
    source::ExpertSource,
};

/// Where a state's token is in its sample, as dropout knows rows; its actions are behind it.
const STATE: u64 = 1 << 32;
/// Where a sample's hidden states are for dropout, in the order in which the head reads them.
const HIDDEN: u64 = 1 << 33;

/// A policy: frozen weights, and where its trainables lie in the flat parameter buffer.
struct Gr00tPolicy<B: Tape<Base = B>> {
    vlm: Box<dyn VisionLanguage<B>>,
    /// Whether anything of that trains.
    vlm_trains: bool,
    head: ActionHead<B>,
    config: Gr00tConfig,
    device: B::Device,
}

/// Reads a policy of this configuration.
pub(crate) fn load<B: Tape<Base = B>>(
    config: &Gr00tConfig,
    job: PolicyLoad<'_, B>,
) -> Result<Box<dyn Policy<B>>, ModelError> {
    let PolicyLoad { files: PolicyFiles { directory, backbone, dtype }, tuned, models, layout, device } = job;
    let checkpoint = &Arc::new(Checkpoint::open_for(&directory.dir, RULES, B::VALUES)?);
    if B::VALUES {
        check_dtype::<B>(dtype)?;
    }
    precision::follow(dtype.dense());
    let (trains, in_flight, blocks) = (tuned.trains(), Cell::default(), BlockWeights::Held);
    let within = within(config.layers);
    let mut loader = Loader {
        checkpoint,
        dtype,
        blocks,
        trains,
        layout: &mut *layout,
        device,
        in_flight,
        within: within.prefix,
    };
    let vlm = models.vision_language.of(backbone)?.load_within(backbone, within, &mut loader)?;
    let vlm_trains = !loader.layout.is_empty();
    loader.within = "";
    let head = ActionHead::load(&mut ExpertSource { loader: &mut loader, full: &tuned.full }, config)?;
    layout.without_decay(|name| !is_reached(name));
    Ok(Box::new(Gr00tPolicy { vlm, vlm_trains, head, config: config.clone(), device: device.clone() }))
}

/// A micro-batch's hidden states: in which order the head reads them, and which of them are what.
struct HiddenOrder<B: Tape<Base = B>> {
    /// Tokens by the place to which they come.
    tokens: Vec<i32>,
    rows: Arc<BlockRows<B>>,
    of_head: Option<HeadRows<B>>,
}

impl<B: Tape<Base = B>> HiddenOrder<B> {
    /// An order in which each sample has its tokens of images first, then the others, then padding.
    fn new(
        Prompts { input_ids, rows, .. }: Prompts<'_>,
        image: u32,
        chunk: usize,
        dropout: Option<DropoutKeys<'_>>,
        device: &B::Device,
    ) -> Self {
        let cells = rows.cells(input_ids.len());
        let [_, seq] = rows.axes(input_ids.len());
        let mut tokens = Vec::with_capacity(input_ids.len());
        let (mut whole, mut text, mut images) = (vec![], vec![], vec![]);
        for (row, valid) in cells.iter().enumerate() {
            let is_image = |at: &usize| input_ids[*at] == image;
            let seen = valid.clone().filter(is_image).count() as u32;
            let len = valid.len() as u32;
            tokens.extend(valid.clone().filter(is_image));
            tokens.extend(valid.clone().filter(|at| !is_image(at)));
            tokens.extend((row * seq..(row + 1) * seq).filter(|at| !valid.contains(at)));
            whole.push(0..len);
            images.push(0..seen);
            text.push(seen..len);
        }
        let keys = |ranges: Vec<Range<u32>>| AttentionMask::Keys(ranges.into());
        let (dropout, of_head) = dropout.map(|of| rows_of::<B>(of, seq, chunk, device)).unzip();
        let (whole, text, images) = (keys(whole), keys(text), keys(images));
        let rows = Arc::new(BlockRows { batch: cells.len(), whole, text, images, dropout });
        Self { tokens: tokens.into_iter().map(|at| at as i32).collect(), rows, of_head }
    }

    /// Hidden states of tokens, in this order.
    fn ordered(&self, hidden_nd: Tensor<B, 2>) -> Tensor<B, 2> {
        chosen(hidden_nd, self.tokens.clone())
    }

    /// And back.
    fn as_tokens(&self, hidden_nd: Tensor<B, 2>) -> Tensor<B, 2> {
        let mut places = vec![0; self.tokens.len()];
        (0..).zip(&self.tokens).for_each(|(place, token)| places[*token as usize] = place);
        chosen(hidden_nd, places)
    }
}

fn chosen<B: Tape<Base = B>>(x_nd: Tensor<B, 2>, rows: Vec<i32>) -> Tensor<B, 2> {
    let (device, count) = (x_nd.device(), rows.len());
    let rows: Tensor<B, 1, Int> = Tensor::from_data(TensorData::new(rows, [count]), &device);
    x_nd.select(0, rows)
}

/// As dropout knows the rows of hidden states and times, and those of the head's tokens.
fn rows_of<B: Tape<Base = B>>(
    of: DropoutKeys<'_>,
    seq: usize,
    chunk: usize,
    device: &B::Device,
) -> ([DropoutRows<B>; 2], HeadRows<B>) {
    let device = (!B::ON_HOST).then_some(device);
    let words: Vec<u64> = of.samples.iter().map(|&sample| sample_word(of.seed, of.step, sample)).collect();
    let rows = |first: u64, count: usize| {
        let of_sample = |&word: &u64| (0..count as u64).map(move |place| row_word(word, first + place));
        DropoutRows::new(words.iter().flat_map(of_sample).collect(), device)
    };
    let head = HeadRows { states: rows(STATE, 1), tokens: rows(STATE, 1 + chunk) };
    ([rows(HIDDEN, seq), rows(STATE, 1)], head)
}

impl<B: Tape<Base = B>> Gr00tPolicy<B> {
    /// The input of the layer behind the last one.
    fn tap(&self) -> Tap {
        Tap::Layer(self.vlm.outline().layers)
    }

    fn run<'a>(
        &'a self,
        trainables: &'a Trainables<B>,
        observed: PolicyObservation<'a>,
        recompute: Recompute,
        dropout: Option<DropoutKeys<'a>>,
    ) -> Result<Box<dyn VlRun<B> + 'a>, PassError> {
        let kept = observed.features.map(|kept| KeptInput { tap: self.tap(), values: kept.values });
        let retention = Retention::in_float32(recompute);
        Ok(self.vlm.run(VlPass { prompts: observed.prompts, kept, trainables, retention, dropout })?)
    }

    fn order(&self, observed: PolicyObservation<'_>, dropout: Option<DropoutKeys<'_>>) -> HiddenOrder<B> {
        let chunk = self.config.head.chunk;
        HiddenOrder::new(observed.prompts, observed.image, chunk, dropout, &self.device)
    }
}

impl<B: Tape<Base = B>> Policy<B> for Gr00tPolicy<B> {
    fn sizes(&self) -> PolicySizes<'_> {
        self.config.sizes()
    }

    fn forward_kept<'a>(
        &'a self,
        trainables: &'a Trainables<B>,
        training: Training<'a>,
        observed: PolicyObservation<'a>,
        draws: Draws<'_>,
    ) -> Result<(Tensor<B, 2>, BackwardPass<'a, B>), PassError> {
        let Training { recompute, dropout } = training;
        let order = self.order(observed, dropout);
        let trains = self.vlm_trains && observed.features.is_none();
        let value = {
            let run = self.run(trainables, observed, recompute, dropout)?;
            // Adapters that drop do so in a pass with a trace alone.
            if trains && dropout.is_some() {
                run.forward(&[self.tap()], &mut |_| {})?.0.swap_remove(0)
            } else {
                run.until(self.tap())?
            }
        };
        let hidden = Input { value: order.ordered(value), tracked: trains };
        let given = HeadInputs {
            state: observed.state,
            draws,
            rows: order.rows.clone(),
            dropout: order.of_head.as_ref(),
            device: &self.device,
        };
        let retention = Retention::in_float32(recompute);
        let (velocity, trace) = self.head.forward(trainables, retention, hidden, &given);
        let backward = move |dv_nc, grads: &mut dyn GradientSums<B>| {
            let Some(dhidden_nd) = ActionHead::backward(trace, dv_nc, grads) else { return };
            const RAN: &str = "its blocks are held, and the same pass ran a moment ago";
            let run = self.run(trainables, observed, recompute, dropout).expect(RAN);
            let (_, trace) = run.forward(&[self.tap()], &mut |_| {}).expect(RAN);
            trace.backward(vec![order.as_tokens(dhidden_nd)], grads, &mut |_| {}).expect(RAN);
        };
        Ok((velocity, Box::new(backward)))
    }

    fn features(
        &self,
        trainables: &Trainables<B>,
        observed: PolicyObservation<'_>,
        _kept: KeptTokens,
    ) -> Result<Tensor<B, 2>, PassError> {
        let run = self.run(trainables, observed, Recompute::None, None)?;
        let hidden_nd = run.until(self.tap())?;
        let cells = observed.prompts.rows.cells(observed.prompts.input_ids.len());
        Ok(chosen(hidden_nd, cells.into_iter().flatten().map(|at| at as i32).collect()))
    }

    fn sampler<'a>(
        &'a self,
        trainables: &'a Trainables<B>,
        observed: PolicyObservation<'_>,
    ) -> Result<Velocity<'a, B>, PassError> {
        let order = self.order(observed, None);
        let hidden_nd = self.run(trainables, observed, Recompute::None, None)?.until(self.tap())?;
        let params = ParamScope::<B>::frozen(trainables);
        let head = self.head.prepare(&params, order.ordered(hidden_nd), order.rows.clone());
        let state = observed.state.to_vec();
        Ok(Box::new(move |draws: Draws<'_>| {
            let (rows, device) = (order.rows.clone(), &self.device);
            let given = HeadInputs { state: &state, draws, rows, dropout: None, device };
            head.velocity(&ParamScope::<B>::frozen(trainables), &given)
        }))
    }
}
