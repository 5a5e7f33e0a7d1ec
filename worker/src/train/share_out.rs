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

use super::{TrainError, advice::advice, training::Training};
use crate::{
    collective::{
        RingListener,
        parts::{self, Caller, PartServer, RemotePeers},
    },
    link::Phase,
    memory::{self, OutOfMemory},
};

impl<B: Tape<Base = B>> Training<'_, B> {
    /// Takes this rank's part, and tells the others where they may ask for it. Nothing happens where every
    /// rank holds everything, and in a generation that only saves.
    pub(super) fn share_out(&mut self, listener: Option<&RingListener>) -> Result<(), TrainError> {
        let held = self.learner.objective.held_parts().filter(|_| !self.members.assignment.closing);
        let Some(held) = held else { return Ok(()) };
        let comm = &self.members.comm;
        let cut = Cut { rank: comm.rank().0 as usize, world: comm.world() };
        let peers: Arc<dyn Peers> = match listener.filter(|_| cut.is_shared()) {
            Some(listener) => Arc::new(self.meet(listener, cut, held)?),
            None => Arc::new(NoPeers),
        };
        let before = memory::in_use();
        let objective = &self.learner.objective;
        match memory::guarded(|| objective.share_out(cut, &peers)) {
            Ok(taken) => taken?,
            Err(overrun) => {
                let found = self.stats.meter.out_of_memory(Phase::Connecting, overrun.in_use, before);
                let source = OutOfMemory { device: overrun.device, ..found };
                let advice = advice(self.run.task, self.run.spec);
                return Err(TrainError::Exhausted { step: self.next, source: source.into(), advice });
            }
        }
        // A part of another cut was there before, and is gone.
        let snapshots = &mut self.stats.snapshots;
        snapshots.parts = (snapshots.parts + memory::in_use()).saturating_sub(before);
        Ok(())
    }

    /// Whom to ask for the other parts. All ranks call it together.
    fn meet(
        &mut self,
        listener: &RingListener,
        cut: Cut,
        held: Arc<dyn HeldParts>,
    ) -> Result<RemotePeers, TrainError> {
        let named = format!("{} {}", self.members.link.run_id(), self.run.spec_digest);
        let (run, blocks) = (*blake3::hash(named.as_bytes()).as_bytes(), held.digest());
        let tokens = listener.tokens().cloned();
        if self.members.parts.is_none() {
            let started = listener.ip().and_then(|ip| PartServer::start(ip, run, held, tokens.clone()));
            let started = started.inspect_err(|error| {
                tracing::warn!(%error, "no port to answer on: the other ranks read this one's part of the frozen weights from the files");
            });
            self.members.parts = started.ok();
        }
        let own = self.members.parts.as_ref().map(PartServer::address);
        let addresses = parts::exchange(self.members.comm.as_mut(), own)?;
        Ok(RemotePeers::new(Caller { run, blocks, cut, tokens }, addresses))
    }
}
