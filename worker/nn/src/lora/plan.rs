//! Which linears of a model get an adapter, of which rank and scale.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fmt,
    sync::{Mutex, PoisonError},
};

use super::{
    error::LoraError,
    module::Module,
    settings::{Bias, Lora, LoraTargets},
    targets::{LayerFilter, PatternTable, Targets},
};

/// Patterns, each with its key, that were warned of: a plan is made anew for each question about it.
static WARNED_OF: Mutex<BTreeSet<(&str, String)>> = Mutex::new(BTreeSet::new());

/// An adapter of one linear.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdapterSpec {
    /// `r`.
    pub rank: usize,
    /// `lora_alpha`.
    pub alpha: f64,
    /// `alpha / r`, or `alpha / sqrt(r)` with rsLoRA.
    pub scale: f64,
    /// Whether it has magnitudes beside directions (DoRA).
    pub dora: bool,
}

/// LoRA settings as PEFT holds them: patterns keep their order, because the first that matches wins.
#[derive(Clone, Debug, PartialEq)]
pub struct Recipe {
    /// `r`.
    pub rank: usize,
    /// `lora_alpha`.
    pub alpha: f64,
    /// `use_rslora`.
    pub rslora: bool,
    /// `target_modules`.
    pub targets: LoraTargets,
    /// `rank_pattern`.
    pub rank_pattern: Vec<(String, usize)>,
    /// `alpha_pattern`.
    pub alpha_pattern: Vec<(String, f64)>,
    /// `lora_dropout`.
    pub dropout: f64,
    /// `use_dora`.
    pub dora: bool,
    /// `bias`.
    pub bias: Bias,
    /// `exclude_modules`.
    pub exclude_modules: Option<LoraTargets>,
    /// `layers_to_transform`; empty for all.
    pub layers_to_transform: Vec<u64>,
    /// `layers_pattern`; empty for every numbered list.
    pub layers_pattern: Vec<String>,
}

impl From<&Lora> for Recipe {
    fn from(lora: &Lora) -> Self {
        Self {
            rank: lora.rank,
            alpha: lora.alpha,
            rslora: lora.rslora,
            targets: lora.targets.clone(),
            rank_pattern: lora.rank_pattern.iter().map(|(k, v)| (k.to_owned(), *v)).collect(),
            alpha_pattern: lora.alpha_pattern.iter().map(|(k, v)| (k.to_owned(), *v)).collect(),
            dropout: lora.dropout,
            dora: lora.use_dora,
            bias: lora.bias,
            exclude_modules: lora.exclude_modules.clone(),
            layers_to_transform: lora.layers_to_transform.clone(),
            layers_pattern: lora.layers_pattern.clone(),
        }
    }
}

/// The adapters of a model: a recipe, applied to its modules.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraPlan {
    recipe: Recipe,
    adapters: BTreeMap<String, AdapterSpec>,
}

impl LoraPlan {
    /// Applies the run's settings to a model's modules.
    pub fn resolve(lora: &Lora, modules: &[Module]) -> Result<Self, LoraError> {
        Self::from_recipe(lora.into(), modules, "lora.targets")
    }

    /// Applies a recipe; `field` names its targets in errors.
    pub(super) fn from_recipe(recipe: Recipe, modules: &[Module], field: &str) -> Result<Self, LoraError> {
        let mut admitted = Vec::with_capacity(modules.len());
        let filter = RecipeFilter::new(&recipe)?;
        for module in modules {
            if filter.admits(&module.name)? {
                admitted.push(module.clone());
            }
        }
        let names = Targets::new(&recipe.targets, field)?.select(&admitted)?;
        let patterns = RecipePatterns::new(&recipe)?;
        patterns.warn_of_idle(&names)?;
        let adapters = names
            .into_iter()
            .map(|name| patterns.adapter(&recipe, &name).map(|spec| (name, spec)))
            .collect::<Result<_, _>>()?;
        Ok(Self { recipe, adapters })
    }

    /// These adapters under other module paths.
    pub(super) fn renamed(self, names: &HashMap<String, String>) -> Self {
        let adapters = self.adapters.into_iter().map(|(name, spec)| (names[&name].clone(), spec)).collect();
        Self { adapters, ..self }
    }

    /// The adapter of a module, if it has one.
    pub fn adapter(&self, module: &str) -> Option<&AdapterSpec> {
        self.adapters.get(module)
    }

    /// All adapters by module path.
    pub fn adapters(&self) -> impl Iterator<Item = (&str, &AdapterSpec)> {
        self.adapters.iter().map(|(name, spec)| (name.as_str(), spec))
    }

    /// Whether a tensor of a checkpoint is a bias that trains beside the adapters, by its name.
    pub fn trains_bias(&self, tensor: &str) -> bool {
        let Some(module) = tensor.strip_suffix(".bias") else { return false };
        match self.recipe.bias {
            Bias::None => false,
            // Not those of what is around the pretrained model.
            Bias::All => module.starts_with("model."),
            Bias::LoraOnly => self.adapters.contains_key(module),
        }
    }

    /// The settings it was made from.
    pub fn recipe(&self) -> &Recipe {
        &self.recipe
    }

    /// Where a run file's plan first differs from an adapter's, in words; none when both adapt alike.
    pub fn difference(&self, other: &Self) -> Option<String> {
        for (name, spec) in &self.adapters {
            match other.adapters.get(name) {
                None => return Some(format!("`{name}` has an adapter only in the run file")),
                Some(theirs) if theirs != spec => {
                    return Some(format!("`{name}`: {spec} in the run file, {theirs} in the adapter"));
                }
                Some(_) => {}
            }
        }
        if let Some(extra) = other.adapters.keys().find(|name| !self.adapters.contains_key(*name)) {
            return Some(format!("`{extra}` has an adapter in that directory, but not in the run file"));
        }
        let [ours, theirs] = [self, other].map(|plan| plan.recipe.bias.as_str());
        (ours != theirs).then(|| format!("bias: {ours} in the run file, {theirs} in the adapter"))
    }
}

impl fmt::Display for AdapterSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}, alpha {}, scale {:.4}", self.rank, self.alpha, self.scale)?;
        if self.dora { f.write_str(", DoRA") } else { Ok(()) }
    }
}

/// What a recipe leaves out of whatever its targets match.
struct RecipeFilter<'a> {
    excluded: Option<Targets<'a>>,
    layers: Option<LayerFilter>,
}

impl<'a> RecipeFilter<'a> {
    fn new(recipe: &'a Recipe) -> Result<Self, LoraError> {
        let excluded = recipe.exclude_modules.as_ref();
        let excluded = excluded.map(|names| Targets::excluded(names, "exclude_modules")).transpose()?;
        // PEFT looks at layers only when targets are a list.
        let counted = matches!(recipe.targets, LoraTargets::Suffixes(_));
        let layers = (counted && !recipe.layers_to_transform.is_empty())
            .then(|| LayerFilter::new(recipe.layers_to_transform.clone(), &recipe.layers_pattern))
            .transpose()?;
        Ok(Self { excluded, layers })
    }

    fn admits(&self, name: &str) -> Result<bool, LoraError> {
        if let Some(excluded) = &self.excluded
            && excluded.matches(name)?
        {
            return Ok(false);
        }
        self.layers.as_ref().map_or(Ok(true), |layers| layers.admits(name))
    }
}

struct RecipePatterns {
    rank: PatternTable<usize>,
    alpha: PatternTable<f64>,
}

impl RecipePatterns {
    fn new(recipe: &Recipe) -> Result<Self, LoraError> {
        Ok(Self {
            rank: PatternTable::new("rank_pattern", &recipe.rank_pattern)?,
            alpha: PatternTable::new("alpha_pattern", &recipe.alpha_pattern)?,
        })
    }

    /// PEFT accepts them, and warns of them as well.
    fn warn_of_idle(&self, adapted: &[String]) -> Result<(), LoraError> {
        for (field, idle) in [
            ("lora.rank_pattern", self.rank.idle(adapted)?),
            ("lora.alpha_pattern", self.alpha.idle(adapted)?),
        ] {
            for pattern in idle {
                let mut warned_of = WARNED_OF.lock().unwrap_or_else(PoisonError::into_inner);
                if !warned_of.insert((field, pattern.to_owned())) {
                    continue;
                }
                tracing::warn!(
                    field,
                    %pattern,
                    "pattern matches no module that has an adapter, and changes nothing: it must match the whole path of a module, or its last parts"
                );
            }
        }
        Ok(())
    }

    fn adapter(&self, recipe: &Recipe, name: &str) -> Result<AdapterSpec, LoraError> {
        let rank = self.rank.value(name)?.unwrap_or(recipe.rank);
        let alpha = self.alpha.value(name)?.unwrap_or(recipe.alpha);
        let setting = |field: &str, problem| LoraError::Setting { field: field.into(), problem };
        if rank == 0 {
            return Err(setting("rank", format!("0 for `{name}`; expected at least 1")));
        }
        if !alpha.is_finite() {
            return Err(setting("alpha", format!("{alpha} for `{name}`; expected a finite number")));
        }
        let scale = if recipe.rslora { alpha / (rank as f64).sqrt() } else { alpha / rank as f64 };
        Ok(AdapterSpec { rank, alpha, scale, dora: recipe.dora })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    };

    use super::*;
    use crate::lora::ModuleKind;

    /// Counts events.
    struct EventCount(Arc<AtomicUsize>);

    impl tracing::Subscriber for EventCount {
        fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
            true
        }
        fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
            tracing::span::Id::from_u64(1)
        }
        fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
        fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
        fn event(&self, _: &tracing::Event<'_>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
        fn enter(&self, _: &tracing::span::Id) {}
        fn exit(&self, _: &tracing::span::Id) {}
    }

    #[test]
    fn a_pattern_that_changes_nothing_is_warned_of_once_however_often_a_plan_is_made() {
        let kind = ModuleKind::Linear { inputs: 2, outputs: 2, bias: false, head: false };
        let name = "model.language_model.layers.0.self_attn.q_proj".to_owned();
        let module = Module { old_name: name.clone(), name, kind };
        let patterns = [("nothing_is_called_so".to_owned(), 4), ("nor_so".to_owned(), 8)];
        let lora = Lora { rank_pattern: patterns.into_iter().collect(), ..Lora::default() };
        let known = [("known".to_owned(), 4)].into_iter().collect();
        let known = Lora { rank_pattern: known, ..Lora::default() };
        // tracing keeps who listens to a call site from the first time that it is reached: that is before.
        LoraPlan::resolve(&known, std::slice::from_ref(&module)).expect("sound");
        let events = Arc::new(AtomicUsize::new(0));
        tracing::subscriber::with_default(EventCount(events.clone()), || {
            for _ in 0..3 {
                LoraPlan::resolve(&lora, std::slice::from_ref(&module)).expect("sound");
            }
        });
        assert_eq!(events.load(Ordering::Relaxed), 2);
    }
}
