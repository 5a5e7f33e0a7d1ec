//! What held-out samples are measured by: sampled actions beside recorded ones, as a whole and by part.

use coxswain_task::{Evaluation, PartSum, Samples};

use super::{
    config::{DataSet, in_metric},
    data::{Dataset, MicroBatch, Mixture, RunData, SampleDims},
};

/// What held-out samples are measured by: squared error in normalised units, which can be compared between
/// data sets, and absolute error in the data set's own units.
pub(super) const MEASURES: [&str; 2] = ["mse_normalized", "mae"];

/// Names of parts: each measure by set of a mixture; then each by dimension of the action, and by step of the
/// horizon.
pub(super) fn parts(dims: SampleDims, sets: &[DataSet]) -> Vec<String> {
    let by_set = MEASURES
        .into_iter()
        .flat_map(|of| sets.iter().map(move |set| format!("{of}/set/{}", in_metric(set.name()))));
    let names = |measure| {
        let by_dim = (0..dims.action).map(move |dim| format!("{measure}/dim{dim}"));
        by_dim.chain((0..dims.horizon).map(move |step| format!("{measure}/step{step}")))
    };
    by_set.chain(MEASURES.into_iter().flat_map(names)).collect()
}

/// Errors of sampled actions, `[b, horizon, action]`, normalised, of a run with so many sets.
pub(super) fn evaluated(
    batch: &MicroBatch,
    data: &dyn RunData,
    set_count: usize,
    mut sampled: Vec<f32>,
) -> Evaluation {
    let mut recorded = batch.actions.clone();
    let (width, horizon) = (data.dims().action, data.dims().horizon);
    let sets: Vec<_> = batch.sample_indices.iter().map(|index| data.set_of(*index)).collect();
    let by_set = |a: &[f32], b: &[f32], f: fn(f64) -> f64| {
        let mut parts = vec![PartSum::default(); set_count];
        each_error(batch, width, a, b, |row, _, error| {
            if let Some(part) = sets[row].and_then(|set| parts.get_mut(set)) {
                part.count += 1.0;
                part.sum += f(error);
            }
        });
        parts
    };
    let mut of_sets = by_set(&sampled, &recorded, |d| d * d);
    let squared = masked_sum(batch, width, &sampled, &recorded, |d| d * d);
    let mut parts = parts_of(batch, [width, horizon], &sampled, &recorded, |d| d * d);
    for actions in [&mut sampled, &mut recorded] {
        denormalize(batch, data, actions);
    }
    let absolute = masked_sum(batch, width, &sampled, &recorded, f64::abs);
    of_sets.extend(by_set(&sampled, &recorded, f64::abs));
    parts.extend(parts_of(batch, [width, horizon], &sampled, &recorded, f64::abs));
    parts.splice(0..0, of_sets);
    let valid = batch.action_valid.chunks(horizon.max(1)).zip(&batch.action_widths);
    let count = valid.map(|(valid, &own)| valid.iter().map(|&v| f64::from(v)).sum::<f64>() * own as f64);
    Evaluation { count: count.sum(), sums: vec![squared, absolute], parts }
}

/// The data behind a run's samples.
pub(super) fn run_data(samples: &dyn Samples) -> &dyn RunData {
    let one = samples.downcast_ref::<Dataset>().map(|one| one as &dyn RunData);
    let several = || samples.downcast_ref::<Mixture>().map(|several| several as &dyn RunData);
    one.or_else(several).expect("samples of a run are those of its task")
}

/// Actions of a batch in the units of the data sets that they are of.
pub(super) fn denormalize(batch: &MicroBatch, data: &dyn RunData, actions: &mut [f32]) {
    let size = data.dims().action * data.dims().horizon;
    let rows = batch.sample_indices.iter().zip(actions.chunks_mut(size.max(1)));
    rows.for_each(|(&index, actions)| data.denormalize_actions(index, actions));
}

/// Tells each difference of the components of valid action steps, with its row of the batch and
/// `[step, dimension]`.
fn each_error(
    batch: &MicroBatch,
    width: usize,
    a: &[f32],
    b: &[f32],
    mut tell: impl FnMut(usize, [usize; 2], f64),
) {
    let horizon = batch.action_valid.len() / batch.len().max(1);
    let steps = a.chunks_exact(width).zip(b.chunks_exact(width)).zip(&batch.action_valid).enumerate();
    for (place, ((a, b), _)) in steps.filter(|(_, (_, valid))| **valid > 0.0) {
        let row = place / horizon;
        for (dim, (&a, &b)) in a.iter().zip(b).enumerate().take(batch.action_widths[row]) {
            tell(row, [place % horizon, dim], f64::from(a) - f64::from(b));
        }
    }
}

/// Sum of `f(difference)` over the components of valid action steps.
fn masked_sum(batch: &MicroBatch, width: usize, a: &[f32], b: &[f32], f: impl Fn(f64) -> f64) -> f64 {
    let mut sum = 0.0;
    each_error(batch, width, a, b, |_, _, error| sum += f(error));
    sum
}

/// Masked sums by dimension of the action, then by step of the horizon; `[width, horizon]` are their numbers.
fn parts_of(
    batch: &MicroBatch,
    [width, horizon]: [usize; 2],
    a: &[f32],
    b: &[f32],
    f: impl Fn(f64) -> f64,
) -> Vec<PartSum> {
    let mut parts = vec![PartSum::default(); width + horizon];
    each_error(batch, width, a, b, |_, [step, dim], error| {
        for part in [dim, width + step] {
            parts[part].count += 1.0;
            parts[part].sum += f(error);
        }
    });
    parts
}
