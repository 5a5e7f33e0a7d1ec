//! What settings would save: the same prediction with one thing changed.

use coxswain_proto::{
    config::TaskSettings,
    run_spec::{Recompute, RunSpec},
};
use coxswain_task::memory::{Ask, Subject, Suggestion};

/// Suggestions for a run, as they are found.
pub struct Savings<'a> {
    subject: &'a dyn Subject,
    ask: Ask,
    now: u64,
    found: Vec<Suggestion>,
}

impl<'a> Savings<'a> {
    /// None yet.
    pub fn new(subject: &'a dyn Subject, ask: Ask) -> Self {
        Self { subject, ask, now: subject.predict(ask).peak(), found: Vec::new() }
    }

    /// A change of the run, if it saves anything and can be made: the override that makes it, and what it
    /// costs.
    pub fn add(&mut self, what: &str, setting: String, remark: &str, change: impl Fn(&mut RunSpec)) {
        let changed = self.subject.changed(&change).ok();
        let peak = changed.map(|subject| subject.predict(self.ask).peak());
        self.push(what, setting, remark, peak.unwrap_or(self.now));
    }

    /// Both modes of recompute that run every block again.
    pub fn add_recompute(&mut self, remark: &str) {
        for (mode, name) in [(Recompute::Selective, "selective"), (Recompute::Full, "full")] {
            let setting = format!("train.recompute={name}");
            self.add("layer recompute", setting, remark, |spec| spec.train.recompute = mode);
        }
    }

    /// Half the samples at once.
    pub fn add_micro_batch(&mut self) {
        if self.ask.micro_batch > 1 {
            let half = self.ask.micro_batch / 2;
            let peak = self.subject.predict(Ask { micro_batch: half, ..self.ask }).peak();
            let remark = "same global batch, accumulation doubles";
            self.push("half the micro-batch", format!("train.micro_batch={half}"), remark, peak);
        }
    }

    /// A change with this peak, which is worth its price whether it saves memory or not.
    pub fn offer(&mut self, what: &str, setting: &str, remark: String, peak: u64) {
        let saves = self.now as i64 - peak as i64;
        self.found.push(Suggestion { what: what.into(), setting: setting.into(), saves, remark });
    }

    fn push(&mut self, what: &str, setting: String, remark: &str, peak: u64) {
        if peak < self.now {
            self.offer(what, &setting, remark.into(), peak);
        }
    }

    /// All of them.
    pub fn into_suggestions(self) -> Vec<Suggestion> {
        self.found
    }
}

/// A change of a task's keys, as one of the run.
pub fn of_settings<S: TaskSettings + Clone>(
    settings: &S,
    change: impl FnOnce(&mut S),
) -> impl Fn(&mut RunSpec) {
    let mut settings = settings.clone();
    change(&mut settings);
    move |spec| spec.set_settings(&settings)
}
