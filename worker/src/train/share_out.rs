//! Frozen weights shared out (`memory.shard: frozen`): where a generation begins, every rank takes the part
//! of its place.
//!
//! A rank whose place has not changed keeps what it holds; a successor, and every rank of a world that grows
//! or shrinks, reads its own from the model's files. State is agreed on afterwards, in collectives, so that
//! no rank runs a pass before all have their parts.

use std::sync::Arc;

use coxswain_nn::{
    kernels::Tape,
    sharded::{Cut, HeldParts, NoPeers, Peers},
};
use coxswain_proto::ids::Step;

use super::{Facts, Learner, Members, RunStats, TrainError};
use crate::{
    collective::{
        RingListener,
        parts::{self, Caller, PartServer, RemotePeers},
    },
    link::Phase,
    memory::{self, OutOfMemory},
};

impl Members {
    /// Takes this rank's part, and tells the others where they may ask for it. Nothing happens where every
    /// rank holds everything, and in a generation that only saves.
    pub fn share_out<B: Tape<Base = B>>(
        &mut self,
        listener: Option<&RingListener>,
        run: &Facts<'_, B>,
        learner: &Learner<B>,
        stats: &mut RunStats,
        next: Step,
    ) -> Result<(), TrainError> {
        let held = learner.objective.held_parts().filter(|_| !self.assignment.closing);
        let Some(held) = held else { return Ok(()) };
        let comm = &self.comm;
        let cut = Cut { rank: comm.rank().0 as usize, world: comm.world() };
        let peers: Arc<dyn Peers> = match listener.filter(|_| cut.is_shared()) {
            Some(listener) => Arc::new(self.meet(run, listener, cut, held)?),
            None => Arc::new(NoPeers),
        };
        let before = memory::in_use();
        let objective = &learner.objective;
        match memory::guarded(|| objective.share_out(cut, &peers)) {
            Ok(taken) => taken?,
            Err(overrun) => {
                let found = stats.meter.out_of_memory(Phase::Connecting, overrun.in_use, before);
                let source = OutOfMemory { device: overrun.device, ..found };
                return Err(TrainError::Exhausted {
                    step: next,
                    source: source.into(),
                    advice: run.advice(),
                });
            }
        }
        // A part of another cut was there before, and is gone.
        let snapshots = &mut stats.snapshots;
        snapshots.parts = (snapshots.parts + memory::in_use()).saturating_sub(before);
        Ok(())
    }

    /// Whom to ask for the other parts. All ranks call it together.
    fn meet<B: Tape<Base = B>>(
        &mut self,
        facts: &Facts<'_, B>,
        listener: &RingListener,
        cut: Cut,
        held: Arc<dyn HeldParts>,
    ) -> Result<RemotePeers, TrainError> {
        let named = format!("{} {}", self.link.run_id(), facts.spec_digest);
        let (run, blocks) = (*blake3::hash(named.as_bytes()).as_bytes(), held.digest());
        let tokens = listener.tokens().cloned();
        if self.parts.is_none() {
            let started = listener.ip().and_then(|ip| PartServer::start(ip, run, held, tokens.clone()));
            let started = started.inspect_err(|error| {
                tracing::warn!(%error, "cannot open a port for other ranks: they read this rank's part of the frozen weights from the files");
            });
            self.parts = started.ok();
        }
        let own = self.parts.as_ref().map(PartServer::address);
        let addresses = parts::exchange(self.comm.as_mut(), own)?;
        Ok(RemotePeers::new(Caller { run, blocks, cut, tokens }, addresses))
    }
}
