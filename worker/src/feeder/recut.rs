//! Micro-batches of another size out of those that are ready: their rows, put together otherwise.
//!
//! ```text
//! ready     | a b c d | e f g h |            4 at a time; b has the longest prompt, so a, c and d are padded
//!                                            to it
//! recut     | a b | c d | e f | ...          2 at a time; c and d are padded to the longer of the two
//! ```
//!
//! A row is a function of its sample and of where features come from, and a micro-batch is put together of
//! rows in one way only ([`put_together`]); so what is cut here has the bits of what would be read anew.
//! Where a row is not there its micro-batch is left to the data threads.
//!
//! No more is kept than may be ready, and one micro-batch for the trainer, which has none then: a rank that
//! is out of memory has use for the rest.

use std::collections::BTreeMap;

use coxswain_proto::ids::Step;

use super::{
    queue::{SharedQueue, State, StepRequest},
    rows::{Row, RowBatch, put_together},
};
use coxswain_data::DataError;
use coxswain_task::Samples;

/// Rows by their step and the index of their sample.
pub(super) type Rows = BTreeMap<(Step, u64), Row>;

impl State {
    /// The rows of these micro-batches, as far as their steps are on record.
    pub(super) fn take_apart(&self, samples: &dyn Samples, ready: impl Iterator<Item = RowBatch>) -> Rows {
        let mut rows = Rows::new();
        for prepared in ready {
            let step = prepared.batch.step();
            let request = self.requests.iter().find(|(_, request)| request.step == step);
            let Some((_, request)) = request else { continue };
            let apart = prepared.into_rows(samples, request.kept.as_ref());
            rows.extend(apart.into_iter().map(|row| ((step, row.sample.index()), row)));
        }
        rows
    }
}

impl SharedQueue {
    /// The micro-batches of the requests on record that these rows make, by number.
    pub(super) fn recut(&self, state: &State, mut rows: Rows) -> BTreeMap<u64, Result<RowBatch, DataError>> {
        let mut made = BTreeMap::new();
        for (first, request) in &state.requests {
            let most = state.taken + self.bound(state, request) + 1;
            for number in (*first..*first + request.micro_batches()).take_while(|number| *number < most) {
                let Some(own) = self.take_rows(request, number - first, &mut rows) else { continue };
                let made_anew = put_together(&*self.samples, request.step, own, request.kept.as_ref());
                made.insert(number, Ok(made_anew));
            }
        }
        made
    }

    /// The rows of one micro-batch, if all are there.
    fn take_rows(&self, request: &StepRequest, number: u64, rows: &mut Rows) -> Option<Vec<Row>> {
        let key = |position| Some((request.step, self.order.sample(request.epoch, position)?));
        let keys: Vec<(Step, u64)> = request.part(number).map(key).collect::<Option<_>>()?;
        let all = keys.iter().all(|key| rows.contains_key(key));
        all.then(|| keys.iter().filter_map(|key| rows.remove(key)).collect())
    }
}

#[cfg(test)]
mod tests;
