//! The samples of one micro-batch, with features from the store where it has them.
//!
//! ```text
//! no store      numbers, images, prompt of every sample                      as always
//! hit           numbers from the data set; prompt, shapes and features from the record: no image is decoded,
//!               nothing is tokenized
//! miss          numbers, images, prompt; its features are left to the trainer, with room kept for them
//! ```
//!
//! A record that does not match its checksum is a miss, logged once when the trainer takes the micro-batch. A
//! micro-batch comes apart into its rows again, so that others can be made of them without reading anything.
//! What this file does not do: compute features, or write any.

use std::{collections::BTreeMap, ops::Range, sync::Arc, time::Duration};

use coxswain_proto::ids::Step;
use rayon::prelude::*;

use super::{note, poison};
use crate::clock;
use coxswain_data::DataError;
use coxswain_feature_store::{Namespace, SampleKey};
use coxswain_task::{Batch, CachedFeatures, FeatureShape, Inputs, Sample, SampleKeys, Samples};

/// Where the features of a step's samples come from, if they are there.
#[derive(Clone)]
pub struct KeptFeatures {
    /// The namespace of the store that holds what this model would compute; none if there is no place for
    /// one.
    pub namespace: Option<Namespace>,
    /// The key of every sample.
    pub keys: Arc<SampleKeys>,
    /// Which tokens have features, and how many values each.
    pub shape: FeatureShape,
}

/// A micro-batch, and what is still to be done for it.
#[derive(Debug)]
pub struct RowBatch {
    /// The rows. If features are asked for there are no pixels, and room for the features of missing rows.
    pub batch: Box<dyn Batch>,
    /// Rows whose features are to be computed, in order.
    pub missing: Vec<UncachedRow>,
    /// Rows whose features were computed, not found.
    pub computed: Vec<usize>,
    /// Rows that were taken out to compute their features, and not put back.
    pub(super) lent: Vec<usize>,
    /// Time spent reading features, summed over threads.
    pub read: Duration,
    /// What was found damaged, for people.
    pub damaged: Vec<String>,
}

/// A row whose features the store does not have.
#[derive(Clone, Debug)]
pub struct UncachedRow {
    /// Which row of the micro-batch.
    pub row: usize,
    /// The place of its features among the values of the micro-batch.
    pub place: Range<usize>,
    /// Under which its features are kept; none if its file could not be read when keys were made.
    pub key: Option<SampleKey>,
    /// What its features are computed from; the rest is in the micro-batch alone.
    pub seen: Box<dyn Sample>,
}

/// A sample that a step takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SampleRequest {
    /// Position in the epoch's order.
    pub position: u64,
    /// Index in the data set.
    pub index: u64,
}

/// The micro-batch of these samples, in order, as steps of this epoch see them; with room for features if
/// `kept` says where they are from. Rows are read side by side on the threads of the pool that this runs in.
/// The first sample that cannot be used is named by its place among those that are wanted.
pub(super) fn prepare(
    samples: &dyn Samples,
    step: Step,
    epoch: u64,
    wanted: &[SampleRequest],
    kept: Option<&KeptFeatures>,
) -> Result<RowBatch, (usize, DataError)> {
    let unread = DataError::Pipeline("the process that read it crashed".into());
    let row = |place: usize| {
        let SampleRequest { position, index } = wanted[place];
        let _reading = note::reading(epoch, position, || samples.damaged_row(index, &unread));
        poison::taste(index);
        match kept {
            Some(kept) => Row::load(samples, index, kept),
            None => Ok(Row::from_sample(samples.read_in_epoch(index, epoch)?)),
        }
    };
    // In the order of the data set: what decodes one sample's frame goes on to the next one's, if they are
    // neighbours in a video.
    let mut places: Vec<usize> = (0..wanted.len()).collect();
    places.sort_by_key(|place| wanted[*place].index);
    // All are read before the first error is looked for, so that it is the same one on any number of threads.
    let mut read: Vec<_> = places.into_par_iter().map(|place| (place, row(place))).collect();
    read.sort_by_key(|(place, _)| *place);
    let rows = read.into_iter().map(|(place, row)| row.map_err(|error| (place, error)));
    let rows = rows.collect::<Result<Vec<_>, _>>()?;
    Ok(put_together(samples, step, rows, kept))
}

/// One row of a micro-batch.
pub(super) struct Row {
    pub(super) sample: Box<dyn Sample>,
    /// Features, unless they are missing.
    values: Vec<f32>,
    /// What to compute them from, where they are missing; its place is within this row.
    missing: Option<UncachedRow>,
    /// Whether its features were computed.
    computed: bool,
    read: Duration,
    damaged: Option<String>,
}

impl Row {
    fn from_sample(sample: Box<dyn Sample>) -> Self {
        Self {
            sample,
            values: Vec::new(),
            missing: None,
            computed: false,
            read: Duration::ZERO,
            damaged: None,
        }
    }

    /// With its features, or with all that it takes to compute them.
    fn load(samples: &dyn Samples, index: u64, kept: &KeptFeatures) -> Result<Self, DataError> {
        let (mut key, began) = (kept.keys.get(index), clock::now());
        let (found, damaged) = match key.and_then(|key| read_record(kept, &key)) {
            Some(Ok(found)) => (Some(found), None),
            Some(Err(damaged)) => (None, Some(damaged)),
            None => (None, None),
        };
        let read = began.elapsed();
        if let Some((inputs, values)) = found {
            if let Some(sample) = samples.read_beside(index, inputs)? {
                return Ok(Self { values, read, ..Self::from_sample(sample) });
            }
            // Under that key are another one's, which stay there.
            key = None;
        }
        let mut sample = samples.read(index)?;
        let Inputs { ids, shapes } = sample.inputs();
        let values = kept.shape.values(&ids, &shapes);
        let missing = Some(UncachedRow { row: 0, place: 0..values, key, seen: sample.take_seen() });
        Ok(Self { missing, read, damaged, ..Self::from_sample(sample) })
    }
}

/// What the store has of a sample, if there is a record that has a value for each that its tokens want; in
/// words, if it is damaged.
fn read_record(kept: &KeptFeatures, key: &SampleKey) -> Option<Result<(Inputs, Vec<f32>), String>> {
    let record = kept.namespace.as_ref()?.get(key)?;
    let wanted = kept.shape.values(record.ids(), record.shapes());
    if record.tokens() * kept.shape.width != wanted {
        return None;
    }
    let mut values = vec![0.0; record.tokens() * kept.shape.width];
    let read = record.read_f32(&mut values).map_err(|damaged| damaged.to_string());
    let inputs = Inputs { ids: record.ids().to_vec(), shapes: record.shapes().to_vec() };
    Some(read.map(|()| (inputs, values)))
}

impl RowBatch {
    /// The rows it is made of, as they were when it was, or with features that have come since. Those that
    /// are lent are not among them: their features are neither there nor missing.
    pub(super) fn into_rows(self, samples: &dyn Samples, kept: Option<&KeptFeatures>) -> Vec<Row> {
        let Self { batch, missing, computed, lent, mut read, damaged } = self;
        let mut missing: BTreeMap<usize, UncachedRow> =
            missing.into_iter().map(|missing| (missing.row, missing)).collect();
        let (mut damaged, mut begin, mut rows) = (damaged.into_iter(), 0, Vec::with_capacity(batch.len()));
        for (number, sample) in samples.take_apart(&*batch).into_iter().enumerate() {
            let size = kept.map_or(0, |kept| {
                let Inputs { ids, shapes } = sample.inputs();
                kept.shape.values(&ids, &shapes)
            });
            let place = begin..begin + size;
            begin = place.end;
            if lent.contains(&number) {
                continue;
            }
            let missing = missing.remove(&number).map(|missing| UncachedRow { place: 0..size, ..missing });
            let values = match (&missing, batch.features()) {
                (None, Some(features)) => features.values.get(place).map(<[f32]>::to_vec),
                _ => Some(Vec::new()),
            };
            let Some(values) = values else { continue };
            let computed = computed.contains(&number);
            let (read, damaged) = (std::mem::take(&mut read), damaged.next());
            rows.push(Row { sample, values, missing, computed, read, damaged });
        }
        rows
    }
}

/// The micro-batch of these rows, in this order.
pub(super) fn put_together(
    samples: &dyn Samples,
    step: Step,
    rows: Vec<Row>,
    kept: Option<&KeptFeatures>,
) -> RowBatch {
    let (mut all, mut missing, mut computed) = (Vec::with_capacity(rows.len()), Vec::new(), Vec::new());
    let (mut read, mut damaged) = (Duration::ZERO, Vec::new());
    let len = |row: &Row| row.missing.as_ref().map_or(row.values.len(), |missing| missing.place.len());
    let mut values: Vec<f32> = Vec::with_capacity(rows.iter().map(len).sum());
    for row in rows {
        let begin = values.len();
        match row.missing {
            Some(lacking) => {
                values.resize(begin + lacking.place.len(), 0.0);
                missing.push(UncachedRow { row: all.len(), place: begin..values.len(), ..lacking });
            }
            None => values.extend_from_slice(&row.values),
        }
        computed.extend(row.computed.then_some(all.len()));
        read += row.read;
        damaged.extend(row.damaged);
        all.push(row.sample);
    }
    let mut batch = samples.batch(step, &all);
    if let Some(kept) = kept {
        *batch.features_mut() = Some(CachedFeatures { width: kept.shape.width, values });
    }
    RowBatch { batch, missing, computed, lent: Vec::new(), read, damaged }
}
