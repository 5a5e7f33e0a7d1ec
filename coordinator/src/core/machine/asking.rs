//! What people ask of a run.

use super::run::Run;
use crate::core::{
    action::{Directive, Reply},
    event::{NodeName, Ticket},
    failure::End,
    news::MemberChange,
    phase::Phase,
    reason::Reason,
    refusal::Refusal,
};

/// People, and the run that they ask something of.
pub(super) struct People<'a> {
    pub(super) run: &'a mut Run,
}

impl People<'_> {
    pub(super) fn pause(mut self) -> Result<Reply, Refusal> {
        let run = &mut *self.run;
        run.must_go_on()?;
        if !run.orders.pause && run.orders.stop.is_none() {
            run.order(|orders| orders.pause = true);
            run.tell_all(&Directive::Pause);
            self.say_while_training(Reason::Pausing);
        }
        Ok(Reply::Phase(self.run.phase_for(&self.run.voice.reason)))
    }

    pub(super) fn resume(mut self) -> Result<Reply, Refusal> {
        let run = &mut *self.run;
        run.must_go_on()?;
        // Workers that go on already are not disturbed, and those that missed it go on now.
        run.tell_all(&Directive::Resume);
        if run.orders.pause {
            run.order(|orders| orders.pause = false);
            self.say_while_training(Reason::Resumed);
        }
        Ok(Reply::Phase(self.run.phase_for(&self.run.voice.reason)))
    }

    fn say_while_training(&mut self, reason: Reason) {
        if self.run.progress.training().is_some() && self.run.voice.reason != Reason::StepsDone {
            self.run.say(reason);
        }
    }

    pub(super) fn checkpoint_now(self) -> Result<Reply, Refusal> {
        let run = &mut *self.run;
        run.must_go_on()?;
        // One that was asked for and is not written yet is the same.
        if run.orders.checkpoint_due.is_none() {
            let due = Some(run.progress.committed);
            run.order(|orders| {
                (orders.checkpoints, orders.checkpoint_due) = (orders.checkpoints.saturating_add(1), due);
            });
        }
        run.tell_all(&Directive::Checkpoint(run.orders.checkpoints));
        Ok(Reply::Done)
    }

    pub(super) fn stop(self, reason: String) -> Result<Reply, Refusal> {
        let run = &mut *self.run;
        run.must_go_on()?;
        if run.orders.stop.is_none() {
            run.order(|orders| orders.stop = Some(reason.clone()));
            match &run.phase {
                // Nothing has been trained, or all is lost but the checkpoints: nothing to save.
                Phase::Gathering(_) if run.progress.course().is_none() => {
                    run.end(End::Stopped(run.progress.committed, reason));
                }
                Phase::Gathering(_) => run.tell_all(&Directive::Stop(reason)),
                Phase::Running(_) | Phase::Over(_) => {
                    run.tell_all(&Directive::Stop(reason.clone()));
                    run.say(Reason::StopAsked(reason));
                }
            }
        }
        Ok(Reply::Phase(self.run.phase_for(&self.run.voice.reason)))
    }

    /// A table of fresh reports; with `reset`, workers let peaks begin anew behind them.
    pub(super) fn refresh_memory(self, ticket: Ticket, reset: bool) {
        let run = &mut *self.run;
        let is_running = run.phase.running().is_some();
        let is_fresh = is_running && !reset && run.memory.is_fresh(run.now);
        if reset || is_running && !is_fresh {
            run.order(|orders| {
                orders.memory_reports = orders.memory_reports.saturating_add(1);
                if reset {
                    orders.memory_reset = orders.memory_reports;
                }
            });
            run.tell_all(&run.orders.memory());
        }
        let waits = match (is_running, is_fresh) {
            (true, true) => run.memory.join(run.now, ticket),
            (true, false) => {
                run.memory.refresh(run.now, ticket, &run.fleet.roster);
                if reset {
                    run.memory.outdate();
                }
                true
            }
            (false, _) => false,
        };
        if !waits {
            let table = run.memory.table(&run.fleet.roster);
            run.reply(ticket, Ok(Reply::Memory(table)));
        }
    }

    pub(super) fn rebuild_cache(self) -> Result<Reply, Refusal> {
        let run = &mut *self.run;
        run.must_go_on()?;
        let (decided, goes_on) = run.progress.rebuild_cache(&mut run.out)?;
        if goes_on {
            run.grant(&run.progress.dry_ranks());
        }
        Ok(Reply::Rebuild(decided))
    }

    /// A node of an elastic world is to go, because it was drained or its machine is taken away: it leaves
    /// at a step boundary, and the rest trains on without a step lost.
    ///
    /// ```text
    /// asked ─▶ Regroup with a checkpoint ─▶ all leave at one boundary ─▶ Dismiss to those that go
    ///                                                               └──▶ the others form the next one
    /// ```
    ///
    /// Replicas alone would not do: there may be none, or a node may have its own. So the checkpoint of that
    /// boundary is there whatever happens. No worker is let go in the middle of a recovery: each that holds a
    /// part of the state is a member of the next generation first. A node stays marked until another launcher
    /// takes its place, or its own is gone. Losing a worker of such a node costs no restart, and no successor
    /// is asked for.
    pub(super) fn drain(self, node: NodeName, reason: String) -> Result<Reply, Refusal> {
        let run = &mut *self.run;
        run.must_go_on()?;
        let place = match node {
            NodeName::Place(place) => place,
            NodeName::Launcher(node_id) => run.fleet.nodes.find(&node_id)?.0,
        };
        let node = run.fleet.nodes.at(place).filter(|node| !node.gone).ok_or(Refusal::NoNodeThere(place))?;
        let (node_rank, host) = (place, node.host.clone());
        if run.orders.draining.contains(&place) {
            return Ok(Reply::Drained(place));
        }
        self.can_do_without(place)?;
        let run = &mut *self.run;
        run.order(|orders| orders.draining.extend([place]));
        run.announce(MemberChange::NodeDrained { node_rank, host, reason });
        for slot in run.config.world.slots_of(place) {
            if let Some(worker) = run.fleet.roster.living_at(slot) {
                run.dismiss(worker.id);
            }
        }
        run.let_go();
        run.try_form();
        Ok(Reply::Drained(place))
    }

    fn can_do_without(&self, node_rank: u32) -> Result<(), Refusal> {
        let (world, draining) = (self.run.config.world, &self.run.orders.draining);
        if !world.elastic() {
            let why = "the world is fixed (--nnodes MIN:MAX makes it elastic)".to_owned();
            return Err(Refusal::Needed { node_rank, why });
        }
        let stays = |place: &u32| *place != node_rank && !draining.contains(place);
        let staying = self.run.fleet.nodes.living().filter(stays).count();
        let needed = world.least().div_ceil(world.nproc_per_node.max(1)) as usize;
        if staying < needed {
            let why = format!("too few nodes would remain ({staying}, needed: {needed})");
            return Err(Refusal::Needed { node_rank, why });
        }
        Ok(())
    }
}
