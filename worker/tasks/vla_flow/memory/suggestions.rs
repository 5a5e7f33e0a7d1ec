//! What each setting would save: the same prediction with one thing changed.
//!
//! Small figures are shown like large ones: that partitioning the optimizer saves megabytes under LoRA is
//! worth knowing before renting four machines for it.

use crate::vla_flow::config::VlaSettings;
use coxswain_nn::dtypes::ActivationsDtype;
use coxswain_nn::dtypes::FrozenDtype;
use coxswain_proto::run_spec::{Offload, Recompute, RunSpec, Shard};

use super::{Ask, Place, Subject, Suggestion};
use coxswain_proto::memory::Category;

impl Subject {
    /// Every setting that is not yet as frugal as it can be.
    pub fn suggestions(&self, ask: Ask) -> Vec<Suggestion> {
        let now = self.predict(ask).peak() as i64;
        let mut suggestions = Vec::new();
        let mut add = |what: &str, setting: String, remark: &str, peak: Option<u64>| {
            let saves = peak.map_or(0, |peak| now - peak as i64);
            suggestions.push(Suggestion { what: what.into(), setting, saves, remark: remark.into() });
        };
        let changed = |change: &dyn Fn(&mut RunSpec)| {
            self.changed(change).ok().map(|subject| subject.predict(ask).peak())
        };
        let with = |change: &dyn Fn(&mut VlaSettings)| {
            self.with(change).ok().map(|subject| subject.predict(ask).peak())
        };
        if self.vla.model.weights_dtype == FrozenDtype::Float32 {
            let peak = with(&|vla| vla.model.weights_dtype = FrozenDtype::Bfloat16);
            let setting = "model.weights_dtype=bfloat16".into();
            add("frozen weights in bf16", setting, "rounds the frozen weights", peak);
        }
        for (mode, setting, remark) in MODES {
            let peak = changed(&|spec| spec.train.recompute = mode);
            // One that takes more is no help; neither is what the run has.
            if peak.is_some_and(|peak| (peak as i64) < now) {
                add("layer recompute", format!("train.recompute={setting}"), remark, peak);
            }
        }
        if ask.micro_batch > 1 {
            let half = ask.micro_batch / 2;
            let peak = self.predict(Ask { micro_batch: half, ..ask }).peak();
            let remark = "same global batch, accumulation doubles";
            add("half the micro-batch", format!("train.micro_batch={half}"), remark, Some(peak));
        }
        if let Some(rank) = self.vla.lora.as_ref().map(|lora| lora.rank / 2).filter(|&rank| rank > 0) {
            let peak = with(&|vla| {
                if let Some(lora) = &mut vla.lora {
                    lora.rank = rank;
                }
            });
            add("half the LoRA rank", format!("lora.rank={rank}"), "less capacity to learn", peak);
        }
        if self.vla.expert.repeated_noise > 1 {
            let peak = with(&|vla| vla.expert.repeated_noise = 1);
            let remark = "fewer draws for each forward pass of the model";
            add("one noise draw per sample", "expert.repeated_noise=1".into(), remark, peak);
        }
        suggestions.extend(self.narrow_activations(ask));
        suggestions.extend(self.offloading(ask));
        suggestions.extend(self.cache_suggestions(ask));
        suggestions.extend(self.partition(ask));
        suggestions
    }

    /// What keeping activations in two bytes would save, beside the recompute without which they stay in
    /// graphs, in four.
    fn narrow_activations(&self, ask: Ask) -> Option<Suggestion> {
        if self.vla.model.activations_dtype == ActivationsDtype::Bfloat16 {
            return None;
        }
        let in_graphs = self.spec.train.recompute == Recompute::None;
        let peak = |activations| {
            let changed = self.with(|vla| vla.model.activations_dtype = activations);
            let changed = changed.and_then(|subject| {
                subject.changed(|spec| {
                    spec.train.recompute =
                        if in_graphs { Recompute::Selective } else { spec.train.recompute };
                })
            });
            changed.map_or(0, |subject| subject.predict(ask).peak() as i64)
        };
        let saves = peak(ActivationsDtype::Float32) - peak(ActivationsDtype::Bfloat16);
        let remark = match in_graphs {
            true => "needs train.recompute=selective, whose saving is not counted here",
            false => "rounds block outputs and saved activations",
        };
        let (what, setting) = ("activations kept in bf16".into(), "model.activations_dtype=bfloat16".into());
        (saves > 0).then(|| Suggestion { what, setting, saves, remark: remark.into() })
    }

    /// What leaving frozen blocks in their files, or sharing them out, would save, beside the recompute that
    /// both need; and on a GPU what moments in host memory would.
    fn offloading(&self, ask: Ask) -> Vec<Suggestion> {
        let mut suggestions = Vec::new();
        let held = self.spec.memory.offload != Offload::Layers && self.spec.memory.shard == Shard::None;
        if held && self.vla.model.weights_dtype.packing().is_none() {
            let streamed: fn(&mut RunSpec) = |spec| spec.memory.offload = Offload::Layers;
            let remark = "frozen blocks are read from their files whenever they run";
            suggestions.push(self.fetching(
                ask,
                ["frozen layers streamed", "memory.offload=layers"],
                remark,
                streamed,
            ));
            if ask.world > 1 && ask.place != Place::Gpu {
                let sharded: fn(&mut RunSpec) = |spec| spec.memory.shard = Shard::Frozen;
                let what = format!("frozen layers sharded over {} ranks", ask.world);
                let remark = "frozen blocks are gathered from the other ranks whenever they run";
                suggestions.push(self.fetching(ask, [&what, "memory.shard=frozen"], remark, sharded));
            }
        }
        if ask.place == Place::Gpu && self.spec.memory.offload == Offload::None {
            suggestions.push(Suggestion {
                what: "moments in host memory".into(),
                setting: "memory.offload=optimizer".into(),
                saves: self.shards(ask) as i64,
                remark: "every step copies them to the GPU and back".into(),
            });
            // Of a table that trains there is nothing among the frozen weights.
            suggestions.push(Suggestion {
                what: "embedding table in host memory".into(),
                setting: "memory.offload=embedding".into(),
                saves: self.frozen(ask.place).table as i64,
                remark: "every step copies the rows that it needs to the GPU".into(),
            });
        }
        suggestions
    }

    /// What it would save not to hold frozen blocks, as `change` has it.
    fn fetching(
        &self,
        ask: Ask,
        [what, setting]: [&str; 2],
        remark: &str,
        change: fn(&mut RunSpec),
    ) -> Suggestion {
        let tape_holds = matches!(self.spec.train.recompute, Recompute::None | Recompute::Every(2..));
        let needs_full = tape_holds && (self.vla.lora.is_some() || !self.full.is_empty());
        let peak = |change: fn(&mut RunSpec)| {
            let changed = self.changed(|spec| {
                change(spec);
                spec.train.recompute = if needs_full { Recompute::Full } else { spec.train.recompute };
            });
            changed.map_or(0, |subject| subject.predict(ask).peak() as i64)
        };
        let saves = peak(|_| {}) - peak(change);
        let remark = match (saves > 0, needs_full) {
            (false, _) => {
                "frozen weights are used directly from the memory-mapped files and take no extra memory"
            }
            (true, false) => remark,
            (true, true) => "needs train.recompute=full, whose saving is not counted here",
        };
        Suggestion { what: what.into(), setting: setting.into(), saves, remark: remark.into() }
    }

    /// What more ranks would save, or what the ranks there are hold for each other.
    fn partition(&self, ask: Ask) -> Vec<Suggestion> {
        let now = self.predict(ask);
        if ask.world > 1 && self.offloaded(ask.place) {
            return vec![Suggestion {
                what: format!("optimizer partitioned over {} ranks", ask.world),
                setting: "(always on)".into(),
                saves: 0,
                remark: "moments and replica are in host memory".into(),
            }];
        }
        if ask.world > 1 {
            let moments = self.engine(Ask { world: 1, rank: 0, ..ask }).of(Category::OptimizerShard);
            let mut suggestions = vec![Suggestion {
                what: format!("optimizer partitioned over {} ranks", ask.world),
                setting: "(always on)".into(),
                saves: moments as i64 - now.of(Category::OptimizerShard) as i64,
                remark: "already counted above".into(),
            }];
            if now.of(Category::Replica) > 0 {
                suggestions.push(Suggestion {
                    what: "no replica of another rank".into(),
                    setting: "faults.mirror=false".into(),
                    saves: now.of(Category::Replica) as i64,
                    remark: "after losing a worker, the run goes back to its last checkpoint".into(),
                });
            }
            return suggestions;
        }
        let eight = self.predict(Ask { world: 8, ..ask });
        vec![Suggestion {
            what: "optimizer partitioned over 8 ranks".into(),
            setting: "--nproc-per-node 8".into(),
            saves: now.peak() as i64 - eight.peak() as i64,
            remark: match ask.place {
                _ if self.offloaded(ask.place) => "moments and replica are in host memory",
                _ if eight.of(Category::Replica) > 0 => "ranks also hold replicas of other ranks' parts",
                _ => "moments only; gradients and weights stay whole",
            }
            .into(),
        }]
    }
}

/// Modes of recompute, most frugal last.
const MODES: [(Recompute, &str, &str); 3] = [
    (Recompute::Every(2), "{every: 2}", "recomputes every second block"),
    (Recompute::Selective, "selective", "recomputes part of each block"),
    (Recompute::Full, "full", "recomputes every block"),
];
