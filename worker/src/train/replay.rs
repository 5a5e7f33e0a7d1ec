//! A step runs again with ranks moved by one slot: is any rank's arithmetic wrong?
//!
//! ```text
//! due       every `faults.replay_every` steps, and in the second attempt of a step whose numbers were not
//!           finite in the first
//! moved     before its own slice, rank r runs the slice of rank r + 1
//! compared  after the vote, and before any gradient moves: digests of each slice's gradients, loss and count
//!           by the two ranks that ran it. Draws are keyed by step and sample, so they are equal, bit for bit
//! third     where they differ, and all weights are equal, another rank runs the slice, too; of two ranks
//!           each runs both slices again, and a computation whose result is known decides where each stands
//!           by its word
//! wrong     the rank is named, and the step runs again, this test included. A rank that is wrong again ends,
//!           and its successor gets its state from the others, as that of a lost rank does
//! unclear   told; the step runs again without the test, and counts
//! ```
//!
//! So a number that is wrong never reaches the optimizer in a step that is replayed, and what is learned has
//! the bits of an undisturbed run. A replayed step takes about twice as long. It needs no memory beyond that
//! of other steps: the other slice runs first, so that gradients need not be kept, and one micro-batch is in
//! use at a time.
//!
//! What this does not do: judge GPUs, whose kernels are chosen by timing and may add in another order (what
//! differs there is told, and nobody is blamed), compare ranks on different kinds of processors, or look at
//! the collectives and the optimizer (`verify` sees what those leave).

mod judge;

use std::{collections::BTreeSet, ops::Range};

use coxswain_nn::{
    kernels::{Tape, flat::Flat},
    pulse,
};
use coxswain_proto::{
    cache_plan::CacheUse,
    ids::{Rank, Step},
};

use self::judge::{FIELDS, FIRST, ReplayFinding, ReplayRow, Runs, SliceOutcome, second};
use super::{
    TrainError, skip,
    suspicions::Suspicions,
    tally::{Share, Spent, Tried},
    training::Training,
    verify,
    vote::{Fared, Lookout, Verdict},
};
use crate::{
    collective::{Buf, BufMut, Computes},
    feeder::StepRequest,
    health,
    link::{Phase, Report},
    zero::ScaleState,
};

/// A moved run, made before a rank's own.
pub(super) struct Moved(Option<SliceOutcome>);

/// What an attempt has come to when ranks compare.
pub(super) struct Attempted<'a> {
    pub moved: Moved,
    /// Sums over this rank's own slice.
    pub share: &'a Share,
    /// How this rank fared there.
    pub fared: Fared,
    pub verdict: &'a Verdict,
}

/// All ranks: whether this attempt of the step is compared.
fn is_due<B: Tape<Base = B>>(training: &Training<'_, B>, step: Step, tried: &Tried) -> bool {
    let spec = training.run.spec;
    let (every, world) = (spec.faults.replay_every, training.members.world());
    let regular = every > 0 && step.0 > 0 && step.0.is_multiple_of(every);
    // Alone, a rank has run the step twice by then.
    let doubtful = tried.doubt.is_some() && world > 1;
    let suspicious = !tried.suspicions.wrong.is_empty();
    (regular || doubtful || suspicious) && !tried.suspicions.given_up && !skip::is_asked(spec, step)
}

/// Runs the next rank's slice, if this attempt is compared.
pub(super) fn run_moved<B: Tape<Base = B>>(
    training: &mut Training<'_, B>,
    step: Step,
    tried: &Tried,
) -> Result<Option<Moved>, TrainError> {
    match is_due(training, step, tried) {
        true => run(training, step, FIRST[1]).map(|outcome| Some(Moved(outcome))),
        false => Ok(None),
    }
}

/// All ranks, after a vote: compares what each slice came to. True if the step is to run again, since this
/// attempt's gradients are wrong or gone.
pub(super) fn compare<B: Tape<Base = B>>(
    training: &mut Training<'_, B>,
    step: Step,
    attempted: &Attempted<'_>,
    suspicions: &mut Suspicions,
) -> Result<bool, TrainError> {
    // An attempt that did not get through on all ranks runs again, or ends the generation.
    if !matches!(attempted.verdict.fared.0, Fared::Ok | Fared::NotFinite) {
        return Ok(false);
    }
    // A rank that gave up, for another one's sake, has the gradients of a part of its slice.
    let own = match attempted.fared {
        Fared::Ok => Some(digest(training, attempted.share)),
        Fared::NotFinite => Some(SliceOutcome::NotFinite),
        Fared::GaveUp | Fared::OutOfMemory | Fared::Failed => None,
    };
    let rows = gather(training, step, [own, attempted.moved.0], true)?;
    let mut runs = Runs::new(rows.len());
    runs.add(&FIRST, &rows);
    let disputed = runs.disputed();
    if disputed.is_empty() || rows.iter().any(|row| row.kind != rows[0].kind) {
        suspicions.wrong.clear();
        return Ok(false);
    }
    // Wrong weights make wrong gradients, and have a remedy of their own.
    verify::compare(training, step)?;
    let (rank, world) = (training.members.rank().0 as usize, rows.len());
    let mut outcomes = [None; 2];
    for (outcome, shift) in outcomes.iter_mut().zip(second(world)) {
        if disputed.contains(&((rank + shift) % world)) {
            *outcome = run(training, step, *shift)?;
        }
    }
    let known = health::known::compute::<B>(&training.learner.trainables.device());
    if let Err(wrong) = &known {
        training.members.link.report(Report::HardwareFault(wrong.to_string()))?;
    }
    let rows = gather(training, step, outcomes, known.is_ok())?;
    runs.add(second(world), &rows);
    let sound: Vec<bool> = rows.iter().map(|row| row.sound).collect();
    conclude(training, step, runs.judge(&sound), suspicions)?;
    Ok(true)
}

/// Says what was found, and who has to go.
fn conclude<B: Tape<Base = B>>(
    training: &mut Training<'_, B>,
    step: Step,
    finding: ReplayFinding,
    suspicions: &mut Suspicions,
) -> Result<(), TrainError> {
    let own = training.members.rank();
    let wrong = match finding {
        ReplayFinding::Wrong(ranks) if training.members.computes != Computes::OnGpu => ranks,
        ReplayFinding::Wrong(ranks) | ReplayFinding::Unclear(ranks) => {
            suspicions.given_up = true;
            if own == Rank(0) {
                let line = words_of_doubt(step, &ranks);
                training.members.link.report(Report::Note(line))?;
            }
            return Ok(());
        }
    };
    let again: BTreeSet<Rank> = suspicions.wrong.intersection(&wrong).copied().collect();
    if again.contains(&own) {
        // Its failure says so, and counts.
        return Err(TrainError::WrongResult { step });
    }
    if wrong.contains(&own) {
        let line = format!(
            "step {step}: its gradients are not those that other ranks compute from the same samples: the step runs \
             again. If this comes back, look at its device"
        );
        training.members.link.report(Report::HardwareFault(line))?;
    }
    if let Some(rank) = again.first() {
        return Err(TrainError::PeerFailed(*rank));
    }
    suspicions.wrong = wrong;
    Ok(())
}

fn words_of_doubt(step: Step, ranks: &BTreeSet<Rank>) -> String {
    let ranks: Vec<_> = ranks.iter().map(Rank::to_string).collect();
    format!(
        "step {step}: ranks {} compute different gradients from the same samples, and it cannot be told which are \
         right: the step counts as each computes its own",
        ranks.join(", ")
    )
}

/// All ranks say what they came to.
fn gather<B: Tape<Base = B>>(
    training: &mut Training<'_, B>,
    step: Step,
    outcomes: [Option<SliceOutcome>; 2],
    sound: bool,
) -> Result<Vec<ReplayRow>, TrainError> {
    training.enter(Phase::Communication, step)?;
    let row = ReplayRow { outcomes, kind: health::kind::of(training.members.computes), sound }.encode();
    let mut table = vec![0.0; FIELDS * training.members.comm.world()];
    training.members.comm.all_gather(Buf::F64(&row), BufMut::F64(&mut table))?;
    Ok(ReplayRow::decode_all(&table))
}

/// Runs the slice of the rank so many behind this one; none where that cannot be done here. Leaves the
/// gradients of that slice behind.
fn run<B: Tape<Base = B>>(
    training: &mut Training<'_, B>,
    step: Step,
    shift: usize,
) -> Result<Option<SliceOutcome>, TrainError> {
    let mut share = Share::default();
    let outcome = match add_up(training, step, shift, &mut share) {
        Ok(true) => Some(digest(training, &share)),
        Ok(false) => None,
        Err(error) if error.is_not_finite() => Some(SliceOutcome::NotFinite),
        // Its own rank meets this, too, if it is the sample's or the batch's fault.
        Err(error @ (TrainError::DoesNotFit { .. } | TrainError::Data(_) | TrainError::Task(_))) => {
            tracing::info!(step = step.0, %error, "another rank's slice cannot be run here, and is not compared");
            None
        }
        Err(error) => return Err(error),
    };
    // Another rank's slice says nothing of what this rank's micro-batches take.
    training.stats.meter.overlook();
    training.stats.meter.take_overrun();
    Ok(outcome)
}

/// Sums of loss and gradients over the slice of the rank so many behind this one, in its micro-batches; false
/// where its features cannot be had.
fn add_up<B: Tape<Base = B>>(
    training: &mut Training<'_, B>,
    step: Step,
    shift: usize,
    share: &mut Share,
) -> Result<bool, TrainError> {
    let (rank, world) = (training.members.rank().0, training.members.world());
    let slice = Rank((rank + shift as u32) % world);
    let Some(request) = request(training, step, slice) else { return Ok(false) };
    training.begin_gradients(step);
    let (mut spent, mut used) = (Spent::default(), CacheUse::default());
    for number in 0.. {
        training.enter(Phase::Data, step)?;
        let Some(mut prepared) = training.feed.prefetch.aside(&request, number)? else { break };
        training.with_features(|features, desk| features.complete(desk, step, &mut prepared, &mut used))?;
        let batch = &*prepared.batch;
        // An attempt that is lost elsewhere is no reason to leave this one: it may be what decides.
        let mut loss = training.pass_unless(Lookout::blind(), step, batch, &mut spent)?;
        let injected = &mut training.stats.injected;
        loss.loss_sum = match shift % world as usize {
            0 => injected.loss(slice, step, loss.loss_sum),
            _ => injected.loss_elsewhere(slice, step, loss.loss_sum),
        };
        training.learner.judge(step, batch, &loss, true)?;
        share.loss_sum += loss.loss_sum;
        share.valid_count += loss.valid;
    }
    training.flip_a_gradient(step, shift == 0);
    Ok(true)
}

/// What a rank consumes in this step; none if its features are in a generation that is not known here.
fn request<B: Tape<Base = B>>(training: &Training<'_, B>, step: Step, slice: Rank) -> Option<StepRequest> {
    let (world, batch) = (training.members.world(), training.run.plan.batch(step));
    let range: Range<u64> = batch.of_rank(slice, world);
    let quarantined = &training.members.assignment.quarantined;
    let positions = training.feed.usable(training.run.spec.run.seed, quarantined, batch.epoch, range);
    let phase = training.feed.claimed.front().map(|claim| &claim.cache_phase)?;
    let kept = match &training.features {
        Some(features) => features.source(phase, step, &Default::default())?,
        None => None,
    };
    let (epoch, micro_batch) = (batch.epoch, training.feed.micro_batch);
    Some(StepRequest { step, epoch, positions, micro_batch, kept })
}

/// What the gradients that are there now, and these sums, come to.
fn digest<B: Tape<Base = B>>(training: &mut Training<'_, B>, share: &Share) -> SliceOutcome {
    /// Elements that are brought to the host at once.
    const CHUNK: usize = 1 << 20;
    let grads = training.learner.grads.values_mut();
    let len = grads.len();
    if !grads.squares(&[0..len]).is_finite() {
        return SliceOutcome::NotFinite;
    }
    let mut hash = blake3::Hasher::new();
    for begin in (0..len).step_by(CHUNK) {
        hash.update(bytemuck::cast_slice(&grads.read(begin..len.min(begin + CHUNK))));
        pulse::beat();
    }
    hash.update(&share.loss_sum.to_bits().to_le_bytes());
    hash.update(&share.valid_count.to_bits().to_le_bytes());
    let bytes = hash.finalize();
    SliceOutcome::Digest(u64::from_le_bytes(*bytes.as_bytes().first_chunk().expect("a digest has 32 bytes")))
}

impl<B: Tape<Base = B>> Training<'_, B> {
    /// Sums of gradients begin anew, scaled as in this step.
    pub(super) fn begin_gradients(&mut self, step: Step) {
        self.learner.grads.zero();
        self.flip_a_bit(step);
        let scale = self.learner.optimizer().loss_scale();
        self.learner.grads.scale_loss(scale.map(ScaleState::scale));
    }

    /// Makes the gradients of a slice that has run wrong, if a test has asked for it. `own`: whether it is
    /// this rank's.
    pub(super) fn flip_a_gradient(&mut self, step: Step, own: bool) {
        if self.stats.injected.flips_gradient(self.members.rank(), step, own) {
            self.learner.grads.values_mut().edit(|grads| {
                let touched = grads.iter_mut().find(|x| **x != 0.0);
                touched.into_iter().for_each(|x| *x = f32::from_bits(x.to_bits() ^ 1 << 20));
            });
        }
    }

    /// Makes this rank's weights wrong, if a test has asked for it.
    fn flip_a_bit(&mut self, step: Step) {
        let Some(part) = self.stats.injected.flip(self.members.rank(), step) else { return };
        let (world, rank) = (self.members.world() as usize, self.members.rank().0 as usize);
        let range = self.learner.optimizer().part_in(world, (rank + part) % world);
        let mut weights: B::Flat = self.learner.trainables.take();
        weights.edit(|weights| {
            weights[range].first_mut().into_iter().for_each(|x| *x = f32::from_bits(x.to_bits() ^ 1 << 20));
        });
        self.learner.trainables.put(weights);
    }
}
