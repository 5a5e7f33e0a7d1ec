//! One measurement of drift while it goes on: what is compared with what, how far that is, and what all ranks
//! make of it.

use std::ops::Range;

use coxswain_nn::{kernels::Tape, params::Trainables};
use coxswain_proto::ids::{Rank, Step};

use super::{
    desk::Desk,
    drift::{FAILED, FIELDS, Sums, UNAVAILABLE, WELL},
    serving::Serving,
    store_writer::ComputedFeatures,
};
use crate::{
    collective::{Buf, BufMut},
    link::Phase,
    train::TrainError,
};

/// A measurement that goes on.
pub(super) struct DriftMeasurement<B: Tape<Base = B>> {
    /// Before this step: where a generation begins, or where drift decides whether one does.
    pub at: Step,
    /// Each of these steps takes a portion.
    pub portions: Range<Step>,
    pub against: Baseline<B>,
    /// This rank's probes.
    pub probes: Vec<u64>,
    /// How many of them are compared.
    pub done: usize,
    pub sums: Sums,
    /// The step that measured the newest portion.
    pub step: Option<Step>,
    /// The adapter of the generation compared with, once something was missing of that.
    pub older: Option<Trainables<B>>,
    /// Fresh features for the generation that may begin.
    pub made: ComputedFeatures,
}

/// The generation compared with.
pub(super) enum Baseline<B: Tape<Base = B>> {
    /// The one that serves.
    Serving,
    /// The one that served before.
    Before(Box<Serving<B>>),
    /// Adapter cannot be had.
    Lost,
}

/// A measurement of all ranks.
pub(super) struct DriftTotal {
    /// Sums.
    pub total: Sums,
    /// One of them had nothing to compare with.
    pub lost: bool,
}

impl<B: Tape<Base = B>> DriftMeasurement<B> {
    /// The generation compared with, if it serves no more.
    pub fn before(&self) -> Option<&Serving<B>> {
        match &self.against {
            Baseline::Before(serving) => Some(serving),
            Baseline::Serving | Baseline::Lost => None,
        }
    }

    /// What all ranks make of it. `own` is how this one fared.
    pub fn gather(
        &self,
        desk: &mut Desk<'_, '_, B>,
        step: Step,
        own: Result<(), TrainError>,
    ) -> Result<DriftTotal, TrainError> {
        desk.enter(Phase::Communication, step)?;
        let row = match (&own, &self.against) {
            (Err(_), _) => Sums::default().row(FAILED),
            (Ok(()), Baseline::Lost) => Sums::default().row(UNAVAILABLE),
            (Ok(()), _) => self.sums.row(WELL),
        };
        let mut rows = vec![0.0; FIELDS * desk.members.comm.world()];
        desk.members.comm.all_gather(Buf::F64(&row), BufMut::F64(&mut rows))?;
        own?;
        let fared = || rows.chunks_exact(FIELDS).map(Sums::status);
        if let Some((_, rank)) = fared().zip(0..).find(|(status, _)| *status == FAILED) {
            return Err(TrainError::PeerFailed(Rank(rank)));
        }
        Ok(DriftTotal { total: Sums::total(&rows), lost: fared().any(|status| status == UNAVAILABLE) })
    }
}
