//! With whom this rank trains: its place in a generation, the line to the control plane, the communicator.

use std::{sync::atomic::Ordering::Relaxed, time::Duration};

use coxswain_proto::{
    ids::{Generation, Rank, Step},
    run_spec::Collectives,
};

use super::TrainError;
use crate::{
    clock,
    collective::{
        self, Brings, Collective, Computes, Membership, Progress, Ring, RingAbort, RingListener, Solo,
        TransportSource, parts::PartServer,
    },
    link::{Assignment, Link, Phase},
    memory::Meter,
};

/// How long ranks look for each other once all are assigned. The coordinator's abort ends it sooner if one of
/// them is gone.
const RING_PATIENCE: Duration = Duration::from_secs(60);

/// With whom this rank trains.
pub(super) struct Members {
    pub assignment: Assignment,
    pub link: Box<dyn Link + Send>,
    pub comm: Box<dyn Collective>,
    /// What this rank computes on.
    pub computes: Computes,
    /// What may carry large buffers beside the ring.
    pub transport: Option<Box<dyn TransportSource>>,
    /// Answers for this rank's part of the frozen weights; none where they are not shared out.
    pub parts: Option<PartServer>,
}

impl Members {
    /// No member yet: the first assignment gives a place.
    pub fn alone(
        link: Box<dyn Link + Send>,
        computes: Computes,
        transport: Option<Box<dyn TransportSource>>,
    ) -> Self {
        let assignment = Assignment {
            generation: Generation(0),
            rank: Rank(0),
            world: 0,
            next: String::new(),
            quarantined: Vec::new(),
            checkpoint_step: Step(0),
            closing: false,
            replica_distance: 1,
        };
        Self { assignment, link, comm: Box::new(Solo::default()), computes, transport, parts: None }
    }

    /// Leaves the generation. Closing the old ring tells neighbours that still wait in it.
    pub fn leave(&mut self) {
        self.comm = Box::new(Solo::default());
    }

    /// Takes the place that was assigned.
    pub fn connect(
        &mut self,
        listener: Option<&RingListener>,
        digest: &str,
        wanted: Collectives,
    ) -> Result<(), TrainError> {
        self.comm = self.found(listener, digest, wanted)?;
        Ok(())
    }

    /// Begins a phase: for heartbeats, and for memory peaks.
    pub fn enter(&mut self, meter: &mut Meter, phase: Phase, step: Step) -> Result<(), TrainError> {
        self.link.at(phase, step);
        meter.enter(phase).map_err(|source| TrainError::DoesNotFit { step, source })
    }

    /// This worker's position in its generation.
    pub fn rank(&self) -> Rank {
        self.assignment.rank
    }

    /// Ranks in its generation.
    pub fn world(&self) -> u32 {
        self.assignment.world
    }

    /// Time spent in collectives so far.
    pub fn communicating(&self) -> Duration {
        Duration::from_nanos(self.comm.progress().busy_nanos.load(Relaxed))
    }

    /// Finds this rank's neighbours, which are of the same run and of the same specification.
    fn found(
        &mut self,
        listener: Option<&RingListener>,
        digest: &str,
        wanted: Collectives,
    ) -> Result<Box<dyn Collective>, TrainError> {
        let Assignment { generation, rank, world, next, .. } = &self.assignment;
        let Some(listener) = listener.filter(|_| *world > 1) else {
            let solo = Solo::default();
            self.link.connected(solo.abort_handle(), solo.progress());
            return Ok(Box::new(solo));
        };
        let abort = RingAbort::new();
        // Waiting for one's neighbours is waiting as in a collective: a rank that has not come this far keeps
        // the others waiting.
        let waiting = Progress::default();
        waiting.entered.store(1, Relaxed);
        self.link.connected(abort.clone(), waiting.into());
        // Two launches of one file have equal digests, generations and places.
        let run = format!("{} {}", self.link.run_id(), digest);
        let membership =
            Membership { run: &run, generation: *generation, rank: *rank, world: *world as usize, next };
        let deadline = clock::now() + RING_PATIENCE;
        let ring = Ring::connect(listener, &membership, deadline, &abort)?;
        self.link.connected(ring.abort_handle(), ring.progress());
        let source = self.transport.as_mut().map(|source| source.as_mut());
        let brings = Brings { computes: self.computes, source, deadline };
        Ok(collective::join(ring, wanted, brings)?)
    }
}
