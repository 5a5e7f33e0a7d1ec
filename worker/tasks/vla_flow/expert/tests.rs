use burn::{backend::Flex, tensor::TensorData};
use coxswain_proto::run_spec::Recompute;
use proptest::prelude::*;

use super::*;
use crate::vla_flow::adapters;
use coxswain_nn::{
    kernels::dropout::row_word,
    lora::{Lora, LoraPlan, LoraTargets, linear::matrix_keys, merged},
    params::FlatGrads,
    rng::{Key, Purpose},
};

const SHAPE: ExpertShape = ExpertShape {
    width: 8,
    layers: 3,
    heads: 2,
    context: 6,
    state: 3,
    sensor_tokens: 2,
    horizon: 4,
    action: 2,
    form: ExpertForm::PLAIN,
};
/// With everything that an expert may have.
const OF_THE_FIELD: ExpertShape = ExpertShape {
    form: ExpertForm {
        time_in_actions: true,
        state_hidden: Some(5),
        decoder_hidden: Some(7),
        feature_norm: true,
        future_tokens: 3,
        dropout: 0.3,
        layerwise: false,
    },
    ..SHAPE
};
/// The shape of a policy that sees images alone.
const STATELESS: ExpertShape = ExpertShape { state: 0, ..SHAPE };
/// With a block for each layer of a language model.
const LAYERWISE: ExpertShape = ExpertShape {
    state: 0,
    form: ExpertForm {
        decoder_hidden: Some(7),
        future_tokens: 0,
        feature_norm: false,
        layerwise: true,
        ..OF_THE_FIELD.form
    },
    ..SHAPE
};
const SHAPES: [ExpertShape; 4] = [SHAPE, OF_THE_FIELD, STATELESS, LAYERWISE];
const CONTEXT_LEN: usize = 5;
const PLAIN: Retention = Retention::in_float32(Recompute::None);

fn random(rows: usize, columns: usize, stream: u64) -> Tensor<Flex, 2> {
    let mut values = vec![0.0; rows * columns];
    Key { seed: 2, purpose: Purpose::Init, step: stream, sample: 0, repeat: 0 }.draws().normal(&mut values);
    Tensor::from_data(TensorData::new(values, [rows, columns]), &Default::default())
}

fn values(x: Tensor<Flex, 2>) -> Vec<f32> {
    x.into_data().into_vec().expect("f32")
}

struct Toy {
    expert: ActionExpert,
    trainables: Trainables<Flex>,
}

/// Everything one pass gives.
#[derive(Clone, Debug, PartialEq)]
struct Outcome {
    velocity: Vec<f32>,
    hidden: Vec<f32>,
    sensor: Vec<f32>,
    params: Vec<f32>,
}

impl Toy {
    /// With all parameters random: the zero start would hide most of the network.
    fn new() -> Self {
        Self::of(SHAPE)
    }

    fn of(shape: ExpertShape) -> Self {
        let mut layout = TrainableLayout::default();
        let expert = ActionExpert::register(&mut layout, shape, Learning::Whole);
        let flat = values(random(1, layout.len(), 9)).into_iter().map(|v| 0.3 * v).collect();
        Self { expert, trainables: Trainables::new(layout, flat, &Default::default()) }
    }

    /// Where it reads hidden states.
    fn places(&self) -> u64 {
        let shape = self.expert.shape();
        if shape.form.layerwise { shape.layers as u64 } else { 1 }
    }

    fn conditioning(&self, rows: std::ops::Range<usize>) -> Conditioning<Flex> {
        let take =
            |x: Tensor<Flex, 2>, per_row: usize| x.narrow(0, rows.start * per_row, rows.len() * per_row);
        let ranges: Vec<_> = [0..5u32, 2..5, 1..4][rows.clone()].to_vec();
        Conditioning {
            batch: rows.len(),
            state_bc: (self.expert.shape().state > 0).then(|| take(random(3, SHAPE.state, 20), 1)),
            sensor: Some(Input::tracked(take(random(3 * 2, SHAPE.width, 21), 2))),
            hidden: (0..self.places())
                .map(|place| take(random(3 * CONTEXT_LEN, SHAPE.context, 22 + place), CONTEXT_LEN))
                .map(Input::tracked)
                .collect(),
            mask: AttentionMask::Keys(ranges.into()),
        }
    }

    fn dropout(
        &self,
        rows: std::ops::Range<usize>,
        draws: std::ops::Range<usize>,
    ) -> Option<DropoutRows<Flex>> {
        let shape = self.expert.shape();
        let word = |row: usize, draw: usize, token: usize| row_word((10 * row + draw) as u64, token as u64);
        let words = rows.flat_map(|row| {
            let draws = draws.clone();
            draws.flat_map(move |draw| (0..shape.tokens()).map(move |token| word(row, draw, token)))
        });
        (shape.form.dropout > 0.0).then(|| DropoutRows::new(words.collect(), None))
    }

    /// Runs draws `draws` of each of `rows`, with the gradient of draw `(row, r)` taken from a stream of its
    /// own.
    fn run(
        &self,
        rows: std::ops::Range<usize>,
        draws: std::ops::Range<usize>,
        retention: Retention,
    ) -> Outcome {
        let chunk = |stream| {
            let parts: Vec<_> = rows
                .clone()
                .flat_map(|row| draws.clone().map(move |draw| (10 * row + draw) as u64))
                .map(|draw| random(SHAPE.horizon, SHAPE.action, stream + draw))
                .collect();
            Tensor::cat(parts, 0)
        };
        let times: Vec<f32> = rows
            .clone()
            .flat_map(|row| draws.clone().map(move |draw| 0.1 + 0.2 * row as f32 + 0.07 * draw as f32))
            .collect();
        let noisy = Draws { times: &times, noisy_nc: chunk(1000) };
        let dropout = self.dropout(rows.clone(), draws.clone());
        let (velocity, trace) =
            self.expert.forward(&self.trainables, retention, self.conditioning(rows.clone()), noisy, dropout);
        let mut grads = FlatGrads::new(self.trainables.layout().len());
        let gradient = ActionExpert::backward(trace, chunk(2000), &mut grads);
        Outcome {
            velocity: values(velocity),
            hidden: values(Tensor::cat(gradient.hidden.expect("tracked"), 1)),
            sensor: values(gradient.sensor.expect("tracked")),
            params: grads.values().to_vec(),
        }
    }
}

fn close(a: &[f32], b: &[f32]) -> bool {
    let norm = b.iter().map(|v| v * v).sum::<f32>().sqrt();
    let error = a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum::<f32>().sqrt();
    a.len() == b.len() && error <= 1e-5 * norm.max(1e-3)
}

fn add(a: &[f32], b: &[f32]) -> Vec<f32> {
    a.iter().zip(b).map(|(a, b)| a + b).collect()
}

#[test]
fn repeats_share_a_forward_pass_and_give_the_sum_of_single_ones() {
    SHAPES.into_iter().for_each(|shape| repeats_add_up(&Toy::of(shape)));
}

fn repeats_add_up(toy: &Toy) {
    let both = toy.run(0..3, 0..2, PLAIN);
    let (first, second) = (toy.run(0..3, 0..1, PLAIN), toy.run(0..3, 1..2, PLAIN));
    assert!(close(&both.hidden, &add(&first.hidden, &second.hidden)));
    assert!(close(&both.sensor, &add(&first.sensor, &second.sensor)));
    assert!(close(&both.params, &add(&first.params, &second.params)));
    let chunk = SHAPE.horizon * SHAPE.action;
    for row in 0..3 {
        let of = |outcome: &Outcome, draw: usize| outcome.velocity[draw * chunk..(draw + 1) * chunk].to_vec();
        assert!(close(&of(&both, 2 * row), &of(&first, row)));
        assert!(close(&of(&both, 2 * row + 1), &of(&second, row)));
    }
}

#[test]
fn a_batch_gives_what_its_samples_give_alone() {
    SHAPES.into_iter().for_each(|shape| a_batch_adds_up(&Toy::of(shape)));
}

fn a_batch_adds_up(toy: &Toy) {
    let whole = toy.run(0..3, 0..2, PLAIN);
    let alone: Vec<_> = (0..3).map(|row| toy.run(row..row + 1, 0..2, PLAIN)).collect();
    let joined: Vec<f32> = alone.iter().flat_map(|outcome| outcome.velocity.clone()).collect();
    assert!(close(&whole.velocity, &joined));
    let hidden: Vec<f32> = alone.iter().flat_map(|outcome| outcome.hidden.clone()).collect();
    assert!(close(&whole.hidden, &hidden));
    let sum = alone.iter().fold(vec![0.0; whole.params.len()], |sum, outcome| add(&sum, &outcome.params));
    assert!(close(&whole.params, &sum));
}

#[test]
fn without_a_state_there_is_neither_its_token_nor_its_encoder() {
    let named = |shape| {
        let of_state = |name: &str| name.starts_with("expert.state");
        Toy::of(shape).trainables.layout().params().iter().filter(|param| of_state(&param.name)).count()
    };
    assert_eq!((named(SHAPE), named(STATELESS)), (2, 0));
    assert_eq!(STATELESS.tokens() + 1, SHAPE.tokens());
}

#[test]
fn padding_gets_no_gradient() {
    let outcome = Toy::new().run(0..3, 0..1, PLAIN);
    let row = |b: usize, s: usize| &outcome.hidden[(b * CONTEXT_LEN + s) * SHAPE.context..][..SHAPE.context];
    assert!([(1, 0), (1, 1), (2, 0), (2, 4)].iter().all(|&(b, s)| row(b, s).iter().all(|&g| g == 0.0)));
    assert!(row(1, 2).iter().any(|&g| g != 0.0));
}

#[test]
fn every_parameter_gets_a_gradient() {
    SHAPES.into_iter().for_each(|shape| all_get_gradients(&Toy::of(shape)));
}

fn all_get_gradients(toy: &Toy) {
    let outcome = toy.run(0..3, 0..1, PLAIN);
    for param in toy.trainables.layout().params() {
        let gradient = &outcome.params[param.offset..param.offset + param.len()];
        assert!(gradient.iter().any(|&g| g.abs() > 1e-6), "{} has none", param.name);
    }
}

#[test]
fn sampling_sees_the_same_network_as_training() {
    SHAPES.into_iter().for_each(|shape| samples_alike(&Toy::of(shape)));
}

fn samples_alike(toy: &Toy) {
    let (times, noisy_nc) = ([0.3, 0.6, 0.9], random(3 * SHAPE.horizon, SHAPE.action, 5));
    let draws = Draws { times: &times, noisy_nc };
    for activations in [ActivationsDtype::Float32, ActivationsDtype::Bfloat16] {
        let retention = Retention { recompute: Recompute::None, activations };
        let (trained, _) =
            toy.expert.forward(&toy.trainables, retention, toy.conditioning(0..3), draws.clone(), None);
        let velocity = toy.expert.velocity(&toy.trainables, activations, toy.conditioning(0..3));
        assert!(close(&values(velocity(draws.clone())), &values(trained)), "{activations:?}");
        assert_eq!(values(velocity(draws.clone())), values(velocity(draws.clone())));
    }
}

#[test]
fn a_new_expert_predicts_zero_velocity() {
    let mut layout = TrainableLayout::default();
    let expert = ActionExpert::register(&mut layout, SHAPE, Learning::Whole);
    let trainables = Trainables::new(layout.clone(), layout.initial_values(0), &Default::default());
    let toy = Toy { expert, trainables };
    assert!(toy.run(0..3, 0..1, PLAIN).velocity.iter().all(|&v| v == 0.0));
    let mut layout = TrainableLayout::default();
    let expert = ActionExpert::register(&mut layout, OF_THE_FIELD, Learning::Whole);
    let trainables = Trainables::new(layout.clone(), layout.initial_values(0), &Default::default());
    let toy = Toy { expert, trainables };
    let begun = toy.run(0..3, 0..1, PLAIN);
    assert!(begun.velocity.iter().all(|&v| v == 0.0));
    let last =
        layout.params().iter().find(|param| param.name == "expert.decoder.out.weight").expect("an MLP");
    assert!(begun.params[last.range()].iter().any(|&g| g != 0.0), "the layer that starts at zero moves");
}

/// An expert that is brought and not trained; what is below it may still want gradients.
#[test]
fn an_expert_that_does_not_train_passes_the_same_gradients_on_and_has_none() {
    let trained = Toy::new();
    let mut layout = TrainableLayout::default();
    let expert = ActionExpert::register(&mut layout, SHAPE, Learning::Nothing);
    assert!(layout.is_empty());
    let brought = Trainables::new(layout, trained.trainables.to_vec(), &Default::default());
    let frozen = Toy { expert, trainables: brought };
    for mode in [Recompute::None, Recompute::Selective, Recompute::Full] {
        for activations in [ActivationsDtype::Float32, ActivationsDtype::Bfloat16] {
            let retention = Retention { recompute: mode, activations };
            let (ours, theirs) = (frozen.run(0..3, 0..2, retention), trained.run(0..3, 0..2, retention));
            assert_eq!(ours, Outcome { params: vec![], ..theirs }, "{retention:?}");
        }
    }
    let seen = Conditioning {
        sensor: frozen.conditioning(0..1).sensor.map(|sensor| Input::constant(sensor.value)),
        hidden: vec![Input::constant(frozen.conditioning(0..1).hidden.swap_remove(0).value)],
        ..frozen.conditioning(0..1)
    };
    let draws = Draws { times: &[0.4], noisy_nc: random(SHAPE.horizon, SHAPE.action, 5) };
    let (velocity, trace) = frozen.expert.forward(&frozen.trainables, PLAIN, seen, draws, None);
    let gradient = ActionExpert::backward(trace, velocity, &mut FlatGrads::new(0));
    assert!(gradient.hidden.is_none() && gradient.sensor.is_none(), "nobody wants one");
}

/// The toy's expert with adapters that have learned something.
fn adapted() -> (Toy, LoraPlan) {
    let targets = ["attn.q", "attn.v", "1.attn.o", "mlp.out", "ada", "state", "time.out", "final.out"];
    let targets = LoraTargets::Suffixes(targets.map(str::to_owned).into());
    let lora = Lora { rank: 2, alpha: 3.0, targets, ..Lora::default() };
    let plan = LoraPlan::resolve(&lora, &adapters::modules(SHAPE)).expect("an expert has these");
    let mut layout = TrainableLayout::default();
    let expert = ActionExpert::register(&mut layout, SHAPE, Learning::Adapters(&plan));
    let learned = values(random(1, layout.len(), 77)).into_iter().map(|v| 0.3 * v);
    let all = learned.chain(Toy::new().trainables.to_vec()).collect();
    (Toy { expert, trainables: Trainables::new(layout, all, &Default::default()) }, plan)
}

#[test]
fn adapters_of_an_expert_train_alone_and_alike_in_every_mode() {
    let (toy, _) = adapted();
    for activations in [ActivationsDtype::Float32, ActivationsDtype::Bfloat16] {
        let run = |recompute| toy.run(0..3, 0..2, Retention { recompute, activations });
        let unchecked = run(Recompute::None);
        for param in toy.trainables.layout().params() {
            assert!(unchecked.params[param.range()].iter().any(|&g| g.abs() > 1e-6), "{}", param.name);
        }
        for mode in [Recompute::Selective, Recompute::Full, Recompute::Every(2)] {
            assert_eq!(run(mode), unchecked, "{mode:?}, {activations:?}");
        }
    }
}

#[test]
fn an_expert_with_adapters_is_the_one_they_are_merged_into() {
    let (mut toy, plan) = adapted();
    let ours = toy.run(0..3, 0..2, PLAIN);
    let merged = toy.trainables.lend_whole(|layout, all| {
        let merged = merged(&plan, matrix_keys, layout, all);
        merged[layout.len()..].to_vec()
    });
    let whole = Toy::new();
    let layout = whole.trainables.layout().clone();
    assert_ne!(merged, whole.trainables.to_vec());
    let merged = Toy { trainables: Trainables::new(layout, merged, &Default::default()), ..whole };
    let theirs = merged.run(0..3, 0..2, PLAIN);
    assert!(close(&ours.velocity, &theirs.velocity) && close(&ours.hidden, &theirs.hidden));
}

#[test]
fn gradients_of_adapters_are_derivatives() {
    let (mut toy, _) = adapted();
    let outcome = toy.run(0..1, 0..1, PLAIN);
    let norm = outcome.params.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
    let all = toy.trainables.lend_whole(|_, all| all.to_vec());
    let at = |shift: f64| {
        let moved = all.iter().zip(outcome.params.iter().chain(std::iter::repeat(&0.0)));
        let moved = moved.map(|(v, g)| v + (shift / norm * f64::from(*g)) as f32).collect();
        let layout = toy.trainables.layout().clone();
        let moved = Toy {
            expert: toy.expert.clone(),
            trainables: Trainables::new(layout, moved, &Default::default()),
        };
        let seed = values(random(SHAPE.horizon, SHAPE.action, 2000));
        let velocity = moved.run(0..1, 0..1, PLAIN).velocity;
        velocity.iter().zip(seed).map(|(v, d)| f64::from(v * d)).sum::<f64>()
    };
    let slope = (at(1e-3) - at(-1e-3)) / 2e-3;
    assert!((slope - norm).abs() <= 1e-2 * norm, "{slope} for {norm}");
}

#[test]
fn what_blocks_add_is_dropped_in_training_alone() {
    let toy = Toy::of(OF_THE_FIELD);
    let plain =
        Toy::of(ExpertShape { form: ExpertForm { dropout: 0.0, ..OF_THE_FIELD.form }, ..OF_THE_FIELD });
    let velocity = |toy: &Toy| toy.run(0..2, 0..2, PLAIN).velocity;
    assert_eq!(velocity(&toy), velocity(&toy));
    assert!(!close(&velocity(&toy), &velocity(&plain)));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]

    /// The directional derivative along a random direction, by central differences in f32.
    #[test]
    fn gradients_are_derivatives(stream in 100u64..1000, of_the_field in any::<bool>()) {
        let toy = Toy::of(if of_the_field { OF_THE_FIELD } else { SHAPE });
        let direction = values(random(1, toy.trainables.layout().len(), stream));
        let at = |shift: f32| {
            let flat = toy.trainables.to_vec().iter().zip(&direction).map(|(v, d)| v + shift * d).collect();
            let moved = Toy { expert: toy.expert.clone(), trainables: Trainables::new(toy.trainables.layout().clone(), flat, &Default::default()) };
            let outcome = moved.run(0..1, 0..1, PLAIN);
            let seed = values(random(SHAPE.horizon, SHAPE.action, 2000));
            outcome.velocity.iter().zip(seed).map(|(v, d)| f64::from(v * d)).sum::<f64>()
        };
        let step = 2e-4;
        let slope = (at(step) - at(-step)) / f64::from(2.0 * step);
        let found: f64 = toy.run(0..1, 0..1, PLAIN).params.iter().zip(&direction).map(|(g, d)| f64::from(g * d)).sum();
        prop_assert!((slope - found).abs() <= 2e-2 * (1.0 + found.abs()), "{slope} for {found}");
    }
}
#[test]
fn recompute_changes_no_bit() {
    SHAPES.into_iter().for_each(|shape| is_the_same_in_every_mode(&Toy::of(shape)));
}

fn is_the_same_in_every_mode(toy: &Toy) {
    for activations in [ActivationsDtype::Float32, ActivationsDtype::Bfloat16] {
        let run = |recompute| toy.run(0..3, 0..2, Retention { recompute, activations });
        let unchecked = run(Recompute::None);
        for mode in [Recompute::Selective, Recompute::Full, Recompute::Every(2)] {
            assert_eq!(run(mode), unchecked, "{mode:?}, {activations:?}");
        }
    }
}
