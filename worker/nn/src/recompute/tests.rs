use burn::{
    backend::{Autodiff, Flex},
    tensor::TensorData,
};
use proptest::prelude::*;

use super::*;
use crate::{
    kernels::{LinearLayer, LowRank, RowOps},
    params::{FlatGrads, Group, Init, Keep, LinearInputs, ParamId, TrainableLayout},
    rng::{Key, Purpose},
};

const WIDTH: usize = 8;
const TOKENS: usize = 6;
const MODES: [Recompute; 5] =
    [Recompute::None, Recompute::Selective, Recompute::Full, Recompute::Every(2), Recompute::Every(3)];

/// A block of the same build as a real one: frozen weights, low-rank adapters on some of them, two residual
/// halves.
struct ToyBlock {
    frozen: [Tensor<Flex, 2>; 2],
    adapters: Option<[(ParamId, ParamId); 2]>,
}

impl ToyBlock {
    fn new(layout: &mut TrainableLayout, index: usize, trains: bool) -> Self {
        let frozen = [0, 1].map(|half| random([WIDTH, WIDTH], 100 + 2 * index as u64 + half));
        let mut adapter = |half: &str| {
            let mut add = |letter: &str, shape: [usize; 2]| {
                let name = format!("{index}.{half}.{letter}");
                layout.add(name, &shape, Group::LORA, true, Init::Normal(0.5))
            };
            (add("a", [2, WIDTH]), add("b", [WIDTH, 2]))
        };
        Self { frozen, adapters: trains.then(|| [adapter("attention"), adapter("mlp")]) }
    }

    fn half<T: Tape<Base = Flex>>(
        &self,
        half: usize,
        params: &ParamScope<'_, T>,
        x_nd: Tensor<T, 2>,
    ) -> Tensor<T, 2> {
        let gain = Tensor::ones([WIDTH], &x_nd.device());
        let y_nd = <T as RowOps>::rms_norm(x_nd.clone(), gain, 1e-6);
        let layer = || {
            let update = self.adapters.map(|adapters| {
                let (a, b) = adapters[half];
                LowRank { a_ri: params.get(a), b_or: params.get(b), scale: 0.5, dropout: None }
            });
            let w_oi = T::lift(self.frozen[half].clone()).into();
            LinearLayer { w_oi, bias_o: None, update }
        };
        let [kept_nd, again_nd] =
            params.noted_linears(y_nd, [(Keep::Output, layer().into()), (Keep::Never, layer().into())]);
        let x_ni = <T as RowOps>::gelu_tanh(kept_nd) * again_nd;
        params.noted_residual(x_nd, LinearInputs { x_ni, layer: layer().into() })
    }
}

impl Block<Flex> for ToyBlock {
    type Context = ();

    fn attention_half<T: Tape<Base = Flex>>(
        &self,
        params: &ParamScope<'_, T>,
        x_nd: Tensor<T, 2>,
        _context: &(),
    ) -> Tensor<T, 2> {
        self.half(0, params, x_nd)
    }

    fn mlp_half<T: Tape<Base = Flex>>(
        &self,
        params: &ParamScope<'_, T>,
        x_nd: Tensor<T, 2>,
        _context: &(),
    ) -> Tensor<T, 2> {
        self.half(1, params, x_nd)
    }

    fn trains(&self) -> bool {
        self.adapters.is_some()
    }
}

fn random(shape: [usize; 2], stream: u64) -> Tensor<Flex, 2> {
    let mut values = vec![0.0; shape[0] * shape[1]];
    Key { seed: 1, purpose: Purpose::Init, step: stream, sample: 0, repeat: 0 }.draws().normal(&mut values);
    Tensor::from_data(TensorData::new(values, shape), &Default::default())
}

struct Toy {
    blocks: Vec<ToyBlock>,
    trainables: Trainables<Flex>,
}

/// What one forward and backward pass gives.
#[derive(Debug, PartialEq)]
struct Outcome {
    output: Vec<f32>,
    input_gradient: Option<Vec<f32>>,
    gradients: FlatGrads,
}

impl Toy {
    fn new(trains: &[bool]) -> Self {
        let mut layout = TrainableLayout::default();
        let blocks = trains.iter().enumerate().map(|(i, &t)| ToyBlock::new(&mut layout, i, t)).collect();
        let values = layout.initial_values(5);
        Self { blocks, trainables: Trainables::new(layout, values, &Default::default()) }
    }

    fn tower(&self, retention: Retention) -> Tower<'_, Flex, Vec<InContext<'_, Flex, ToyBlock>>> {
        let in_context = |block| InContext { block: BlockRef::Held(block), context: &() };
        let layers = self.blocks.iter().map(in_context).collect();
        Tower { layers, trainables: &self.trainables, retention, sides: vec![], dropout: None }
    }

    fn run(&self, retention: Retention, below_trains: bool) -> Outcome {
        let tower = self.tower(retention);
        let Ok((y_nd, trace)) = tower.forward(random([TOKENS, WIDTH], 1), below_trains);
        let mut gradients = FlatGrads::new(self.trainables.layout().len());
        let Ok(gradient) = tower.backward(trace, random([TOKENS, WIDTH], 2), &mut gradients);
        Outcome { output: values(y_nd), input_gradient: gradient.input.map(values), gradients }
    }

    /// The toy as one graph from input to output, differentiated by burn alone.
    fn whole_graph(&self) -> Outcome {
        let params = ParamScope::<Autodiff<Flex>>::tracked(&self.trainables);
        let x_nd = Tensor::<Autodiff<Flex>, 2>::from_inner(random([TOKENS, WIDTH], 1)).require_grad();
        let mut y_nd = x_nd.clone();
        for block in &self.blocks {
            y_nd = block.mlp_half(&params, block.attention_half(&params, y_nd, &()), &());
        }
        let seed = Tensor::from_inner(random([TOKENS, WIDTH], 2));
        let mut graph = (y_nd.clone() * seed).sum().backward();
        let mut gradients = FlatGrads::new(self.trainables.layout().len());
        params.collect(&mut graph, &mut gradients);
        let input_gradient = x_nd.grad_remove(&mut graph).map(values);
        Outcome { output: values(y_nd.inner()), input_gradient, gradients }
    }
}

fn values(x: Tensor<Flex, 2>) -> Vec<f32> {
    x.into_data().into_vec().expect("f32")
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn every_mode_gives_the_same_bits(
        trains in prop::collection::vec(any::<bool>(), 1..6),
        below: bool,
        rounded: bool,
    ) {
        let toy = Toy::new(&trains);
        let activations = if rounded { ActivationsDtype::Bfloat16 } else { ActivationsDtype::Float32 };
        let unchecked = toy.run(Retention { recompute: Recompute::None, activations }, below);
        for recompute in MODES {
            prop_assert_eq!(&toy.run(Retention { recompute, activations }, below), &unchecked, "{:?}", recompute);
        }
        let Ok(plain) = toy.tower(Retention { recompute: Recompute::None, activations }).run(random([TOKENS, WIDTH], 1));
        prop_assert_eq!(values(plain), unchecked.output, "a pass that keeps nothing");
    }
}

const ROUNDED: ActivationsDtype = ActivationsDtype::Bfloat16;

#[test]
fn rounded_gradients_are_those_of_float32_as_far_as_eight_bits_tell() {
    let toy = Toy::new(&[true; 4]);
    let (exact, rounded) = (
        toy.run(Retention::in_float32(Recompute::Full), true),
        toy.run(Retention { recompute: Recompute::Full, activations: ROUNDED }, true),
    );
    let norm = |values: &[f32]| values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt();
    let error = |a: &[f32], b: &[f32]| {
        let difference: Vec<f32> = a.iter().zip(b).map(|(a, b)| a - b).collect();
        norm(&difference) / norm(b)
    };
    // Eight halves round three times each, the input once: 25 errors of at most 2^-9, which add up like steps
    // of a random walk, and reach a gradient along some four ways (both operands of two products): 4 *
    // sqrt(25) * 2^-9 = 0.04.
    for (rounded, exact) in
        [(&rounded.output[..], &exact.output[..]), (rounded.gradients.values(), exact.gradients.values())]
    {
        let error = error(rounded, exact);
        assert!(0.0 < error && error < 0.04, "{error}");
    }
    assert!(rounded.output.iter().all(|value| value.to_bits() & 0xffff == 0), "the last sum is rounded, too");
}

#[test]
fn what_is_kept_in_bfloat16_takes_half_the_bytes() {
    let toy = Toy::new(&[true; 4]);
    // A half's input and its kept output; the inner products of two updates of rank 2 stay float32.
    let (value, inner) = ((TOKENS * WIDTH) as u64, 4 * (TOKENS * 2) as u64);
    for (recompute, values, inners) in [(Recompute::Full, 1, 1), (Recompute::Selective, 2, 2)] {
        for (activations, each) in [(ActivationsDtype::Float32, 4), (ROUNDED, 2)] {
            let Ok((_, trace)) =
                toy.tower(Retention { recompute, activations }).forward(random([TOKENS, WIDTH], 1), false);
            let bytes = |kept: &LayerTrace<'_, Flex>| match kept {
                LayerTrace::Inputs(halves) => {
                    halves.iter().map(|(x_nd, notes)| bytes_of(x_nd) + notes.bytes()).sum()
                }
                LayerTrace::Graphs(_) => 0u64,
            };
            let found: u64 = trace.kept.iter().map(bytes).sum();
            assert_eq!(found, 8 * (values * each * value + inners * inner), "{recompute:?} {activations:?}");
        }
    }
}

fn bytes_of(x_nd: &Tensor<Flex, 2>) -> u64 {
    (x_nd.dims().iter().product::<usize>() * x_nd.dtype().size()) as u64
}

#[test]
fn segments_chained_by_hand_give_the_gradients_of_one_graph() {
    let toy = Toy::new(&[true, false, true]);
    let (whole, chained) = (toy.whole_graph(), toy.run(Retention::in_float32(Recompute::Full), true));
    assert_eq!(whole.output, chained.output);
    let pairs = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(pairs(whole.gradients.values(), chained.gradients.values()) < 1e-5);
    let (a, b) = (whole.input_gradient.expect("tracked"), chained.input_gradient.expect("asked for"));
    assert!(pairs(&a, &b) < 1e-5);
}

#[test]
fn blocks_below_the_first_that_trains_keep_nothing() {
    let toy = Toy::new(&[false, false, true, false]);
    for mode in MODES {
        let Ok((_, trace)) =
            toy.tower(Retention::in_float32(mode)).forward(random([TOKENS, WIDTH], 1), false);
        assert_eq!((trace.first, trace.kept.len()), (2, 2), "{mode:?}");
    }
}

#[test]
fn a_frozen_tower_above_nothing_keeps_nothing_and_returns_no_gradient() {
    let toy = Toy::new(&[false, false]);
    let Ok((_, trace)) =
        toy.tower(Retention::in_float32(Recompute::None)).forward(random([TOKENS, WIDTH], 1), false);
    assert!(trace.kept.is_empty());
    let outcome = toy.run(Retention::in_float32(Recompute::None), false);
    assert_eq!(outcome.input_gradient, None);
}

#[test]
fn a_frozen_tower_carries_the_gradient_to_what_trains_below_it() {
    let toy = Toy::new(&[false, false]);
    let whole = toy.whole_graph().input_gradient.expect("tracked");
    let found = toy.run(Retention::in_float32(Recompute::Selective), true).input_gradient.expect("asked for");
    assert!(whole.iter().zip(&found).all(|(a, b)| (a - b).abs() < 1e-5));
}

#[test]
fn modes_keep_what_they_say() {
    let toy = Toy::new(&[true; 4]);
    let kept = |mode| {
        let Ok((_, trace)) =
            toy.tower(Retention::in_float32(mode)).forward(random([TOKENS, WIDTH], 1), false);
        let letter = |kept: &LayerTrace<'_, Flex>| match kept {
            LayerTrace::Inputs(_) => 'i',
            LayerTrace::Graphs(_) => 'g',
        };
        trace.kept.iter().map(letter).collect::<String>()
    };
    assert_eq!(kept(Recompute::None), "gggg");
    assert_eq!(kept(Recompute::Selective), "iiii");
    assert_eq!(kept(Recompute::Full), "iiii");
    assert_eq!(kept(Recompute::Every(2)), "igig");
    assert_eq!(kept(Recompute::Every(1)), "iiii");
}
