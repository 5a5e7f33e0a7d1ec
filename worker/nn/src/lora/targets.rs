//! PEFT's rules for module names (`peft/tuners/tuners_utils.py`, `check_target_module_exists`;
//! `peft/utils/other.py`, `get_pattern_key`).
//!
//! | setting | rule |
//! |---|---|
//! | list | the whole path, or a suffix that begins after a dot |
//! | string | a regular expression that must match the whole path (`re.fullmatch`) |
//! | `"all-linear"` | every linear but the LM head, in any case of letters |
//! | `rank_pattern`, `alpha_pattern` | `(.*\.)?(key)$` from the start of the path; the first match wins |
//!
//! Expressions are matched by `fancy-regex`: Python's look-around and back-references work. Differences that
//! remain: Python's `\Z` and `(?(1)..|..)` are not known to it in the same form, possessive and atomic groups
//! follow Oniguruma, and a runaway expression is an error instead of a hang. Module paths are ASCII, so
//! Unicode classes do not matter.

use std::collections::HashSet;

use fancy_regex::Regex;

use super::{
    error::LoraError,
    module::{Module, ModuleKind},
    settings::LoraTargets,
};

/// Names that a message lists.
const SHOWN: usize = 16;
/// Entries of a list that a mistyped name is looked for among: each is compared with every path.
const HINTED: usize = 64;
/// Characters of an expression that may be meant as a name.
const LONGEST_HINTED: usize = 64;

/// Compiled `target_modules`.
pub struct Targets<'a> {
    field: &'a str,
    rule: Rule<'a>,
}

enum Rule<'a> {
    AllLinear,
    Suffixes(Suffixes<'a>),
    Pattern(&'a str, Box<Regex>),
}

/// A list, of which each entry is found at once, however many there are.
struct Suffixes<'a> {
    entries: &'a [String],
    known: HashSet<&'a str>,
    /// How often an entry was looked up.
    #[cfg(test)]
    looks: std::cell::Cell<usize>,
}

impl<'a> Suffixes<'a> {
    fn of(entries: &'a [String]) -> Self {
        let known = entries.iter().map(String::as_str).collect();
        Self {
            entries,
            known,
            #[cfg(test)]
            looks: std::cell::Cell::new(0),
        }
    }

    /// The entries that name a path.
    fn naming<'n>(&self, name: &'n str) -> impl Iterator<Item = &'n str> {
        tails(name).filter(|tail| {
            #[cfg(test)]
            self.looks.set(self.looks.get() + 1);
            self.known.contains(tail)
        })
    }

    /// The entries that name none of these paths.
    fn idle(&self, names: &[String]) -> Vec<&'a String> {
        let used: HashSet<_> = names.iter().flat_map(|name| self.naming(name)).collect();
        self.entries.iter().filter(|entry| !used.contains(entry.as_str())).collect()
    }
}

impl<'a> Targets<'a> {
    /// Compiles targets; `field` names them in errors.
    pub fn new(targets: &'a LoraTargets, field: &'a str) -> Result<Self, LoraError> {
        let rule = match targets {
            LoraTargets::Suffixes(names) => Rule::Suffixes(Suffixes::of(names)),
            LoraTargets::Regex(text) if text.eq_ignore_ascii_case("all-linear") => Rule::AllLinear,
            LoraTargets::Regex(text) => Rule::Pattern(text, Box::new(full_match(field, text)?)),
        };
        Ok(Self { field, rule })
    }

    /// Compiles `exclude_modules`, for which `"all-linear"` means nothing special.
    pub fn excluded(targets: &'a LoraTargets, field: &'a str) -> Result<Self, LoraError> {
        let LoraTargets::Regex(text) = targets else { return Self::new(targets, field) };
        Ok(Self { field, rule: Rule::Pattern(text, Box::new(full_match(field, text)?)) })
    }

    /// Whether a path is named. What `"all-linear"` means depends on kinds: see [`Targets::select`].
    pub fn matches(&self, name: &str) -> Result<bool, LoraError> {
        match &self.rule {
            Rule::AllLinear => Ok(true),
            Rule::Suffixes(suffixes) => Ok(suffixes.naming(name).next().is_some()),
            Rule::Pattern(text, regex) => {
                regex.is_match(name).map_err(|source| pattern_error(self.field, text, source))
            }
        }
    }

    /// The targeted linears. An error if there are none, or if anything else is targeted.
    pub fn select(&self, modules: &[Module]) -> Result<Vec<String>, LoraError> {
        let mut selected = Vec::new();
        for module in modules {
            let hit = match (&self.rule, module.kind) {
                (Rule::AllLinear, ModuleKind::Linear { head, .. }) => !head,
                (Rule::AllLinear, _) => false,
                _ => self.matches(&module.name)?,
            };
            if !hit {
                continue;
            }
            if let Some((kind, remedy)) = not_linear(module.kind) {
                return Err(LoraError::NotLinear {
                    field: self.field.into(),
                    targets: self.text(),
                    module: module.name.clone(),
                    kind,
                    remedy,
                });
            }
            selected.push(module.name.clone());
        }
        if selected.is_empty() {
            return Err(LoraError::NothingMatches {
                field: self.field.into(),
                targets: self.text(),
                hint: self.hint(modules),
            });
        }
        self.warn_of_idle_suffixes(&selected);
        Ok(selected)
    }

    /// PEFT accepts list entries that match nothing; they are usually typing errors.
    fn warn_of_idle_suffixes(&self, selected: &[String]) {
        let Rule::Suffixes(suffixes) = &self.rule else { return };
        let idle = suffixes.idle(selected);
        if !idle.is_empty() {
            tracing::warn!(field = self.field, targets = %shown(&idle), "some entries match no module");
        }
    }

    fn text(&self) -> String {
        match &self.rule {
            Rule::AllLinear => "\"all-linear\"".into(),
            Rule::Suffixes(suffixes) => format!("[{}]", shown(suffixes.entries)),
            Rule::Pattern(text, _) => format!("{text:?}"),
        }
    }

    fn hint(&self, modules: &[Module]) -> String {
        let linears = || {
            modules.iter().filter(|m| matches!(m.kind, ModuleKind::Linear { .. })).map(|m| m.name.as_str())
        };
        let Some(example) = linears().next() else {
            return "exclude_modules and layers_to_transform leave no linear layer to choose from".into();
        };
        let asked: Vec<&str> = match &self.rule {
            Rule::Suffixes(suffixes) => suffixes.entries.iter().take(HINTED).map(String::as_str).collect(),
            Rule::Pattern(text, _) if text.len() <= LONGEST_HINTED => vec![text],
            _ => Vec::new(),
        };
        let ends = || linears().flat_map(tails);
        let distances =
            asked.iter().flat_map(|asked| ends().map(move |end| (strsim::osa_distance(end, asked), end)));
        let near = distances.min_by_key(|(distance, _)| *distance);
        match (near.filter(|(distance, near)| *distance <= 1 + near.len() / 3), &self.rule) {
            (Some((_, near)), Rule::Suffixes(_)) => format!("did you mean \"{near}\"?"),
            (Some((_, near)), _) => {
                format!("did you mean the list [\"{near}\"]? An expression must match the whole path")
            }
            _ => format!("paths look like `{example}`; names match their end, expressions the whole path"),
        }
    }
}

/// Suffixes of a path that a target may name.
fn tails(name: &str) -> impl Iterator<Item = &str> {
    std::iter::once(name).chain(name.match_indices('.').map(|(dot, _)| &name[dot + 1..]))
}

/// Names for a message: the first of them, and how many more there are.
pub(super) fn shown(names: &[impl AsRef<str>]) -> String {
    let first: Vec<_> = names.iter().take(SHOWN).map(|name| format!("{:?}", name.as_ref())).collect();
    let more = match names.len().saturating_sub(SHOWN) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    format!("{}{more}", first.join(", "))
}

fn not_linear(kind: ModuleKind) -> Option<(&'static str, &'static str)> {
    match kind {
        ModuleKind::Linear { .. } => None,
        ModuleKind::Convolution { .. } => Some((
            "the patch embedding, a convolution",
            "write \"attn.proj\" for the vision tower's attention output",
        )),
        ModuleKind::Embedding { .. } => Some(("the token embedding", "leave it out")),
        ModuleKind::Norm { .. } | ModuleKind::Other => {
            Some(("not a linear layer", "name linear layers, such as \"q_proj\" or \"attn.qkv\""))
        }
    }
}

fn full_match(field: &str, text: &str) -> Result<Regex, LoraError> {
    Regex::new(&format!(r"\A(?:{text})\z")).map_err(|source| pattern_error(field, text, source))
}

fn pattern_error(field: &str, text: &str, source: fancy_regex::Error) -> LoraError {
    LoraError::Pattern { field: field.into(), pattern: text.into(), source: Box::new(source) }
}

/// `rank_pattern` or `alpha_pattern`, compiled.
pub struct PatternTable<V> {
    field: &'static str,
    entries: Vec<(String, Regex, V)>,
}

impl<V: Copy> PatternTable<V> {
    /// Compiles keys in their order; `field` names them in errors.
    pub fn new(field: &'static str, entries: &[(String, V)]) -> Result<Self, LoraError> {
        let entries = entries
            .iter()
            .map(|(key, value)| {
                Regex::new(&format!(r"\A(?:.*\.)?(?:{key})\z"))
                    .map(|regex| (key.clone(), regex, *value))
                    .map_err(|source| pattern_error(field, key, source))
            })
            .collect::<Result<_, _>>()?;
        Ok(Self { field, entries })
    }

    /// Keys that match none of these modules: usually typing errors.
    pub fn idle(&self, modules: &[String]) -> Result<Vec<&str>, LoraError> {
        let mut idle = Vec::new();
        for (key, regex, _) in &self.entries {
            let mut is_idle = true;
            for module in modules {
                is_idle &=
                    !regex.is_match(module).map_err(|source| pattern_error(self.field, key, source))?;
            }
            if is_idle {
                idle.push(key.as_str());
            }
        }
        Ok(idle)
    }

    /// The value of the first key that matches.
    pub fn value(&self, name: &str) -> Result<Option<V>, LoraError> {
        for (key, regex, value) in &self.entries {
            if regex.is_match(name).map_err(|source| pattern_error(self.field, key, source))? {
                return Ok(Some(*value));
            }
        }
        Ok(None)
    }
}

/// `layers_to_transform` and `layers_pattern`: adapters only in layers of these numbers.
#[derive(Debug)]
pub struct LayerFilter {
    layers: Vec<u64>,
    patterns: Vec<Regex>,
}

impl LayerFilter {
    /// Without patterns, the first number that follows two path elements counts, as in PEFT.
    pub fn new(layers: Vec<u64>, patterns: &[String]) -> Result<Self, LoraError> {
        let field = "layers_pattern";
        let compile = |text: String| Regex::new(&text).map_err(|source| pattern_error(field, &text, source));
        let patterns = if patterns.is_empty() {
            vec![compile(r"\A.*?\.[^.]*\.(\d+)\.".into())?]
        } else {
            patterns
                .iter()
                .map(|pattern| compile(format!(r"\A(?:.*?\.)?(?:{pattern})\.(\d+)\.")))
                .collect::<Result<_, _>>()?
        };
        Ok(Self { layers, patterns })
    }

    /// Whether a path lies in one of the layers.
    pub fn admits(&self, name: &str) -> Result<bool, LoraError> {
        for pattern in &self.patterns {
            let found = pattern
                .captures(name)
                .map_err(|source| pattern_error("layers_pattern", pattern.as_str(), source))?;
            if let Some(number) = found.and_then(|groups| groups.iter().last().flatten()) {
                return Ok(number.as_str().parse().is_ok_and(|number: u64| self.layers.contains(&number)));
            }
        }
        Ok(false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_list_costs_each_path_no_more_than_a_short_one() {
        let module = |layer: usize| Module {
            name: format!("model.layers.{layer}.self_attn.q_proj"),
            old_name: String::new(),
            kind: ModuleKind::Linear { inputs: 2, outputs: 2, bias: false, head: false },
        };
        let modules: Vec<_> = (0..300).map(module).collect();
        let looks = |entries: usize| {
            let entries = (0..entries).map(|entry| format!("nobody{entry}")).chain(["q_proj".into()]);
            let list = LoraTargets::Suffixes(entries.collect());
            let targets = Targets::new(&list, "target_modules").expect("a list");
            assert_eq!(targets.select(&modules).expect("they are named").len(), modules.len());
            let Rule::Suffixes(suffixes) = &targets.rule else { panic!("a list") };
            suffixes.looks.get()
        };
        assert_eq!(looks(100_000), looks(1));
        assert!(looks(1) <= 2 * 5 * modules.len(), "once to match and once to find what matches nothing");
    }

    #[test]
    fn a_list_is_matched_from_a_dot_on_and_what_matches_nothing_is_told_at_once() {
        let entries = ["q_proj", "attn.k_proj", "proj", "model.v_proj"].map(str::to_owned);
        let suffixes = Suffixes::of(&entries);
        let names = ["model.attn.q_proj", "model.attn.k_proj", "model.v_proj", "o.v_proj"].map(str::to_owned);
        let is_named = |name: &String| suffixes.naming(name).next().is_some();
        assert_eq!(names.each_ref().map(is_named), [true, true, true, false]);
        assert_eq!(suffixes.idle(&names), ["proj"]);
        let many: Vec<_> = (0..100_000).map(|entry| entry.to_string()).collect();
        let told = shown(&many);
        assert!(told.starts_with("\"0\", \"1\", ") && told.ends_with("\"15\" and 99984 more"), "{told}");
    }

    #[test]
    fn patterns_that_match_no_adapted_module_are_found() {
        let keys = [("q_proj", 4), ("q_prjo", 4), ("^q_proj", 8), (r"layers\.1\..*", 2)];
        let table = PatternTable::new("rank_pattern", &keys.map(|(key, rank)| (key.to_owned(), rank)));
        let table = table.expect("they compile");
        let modules =
            ["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj"].map(str::to_owned);
        assert_eq!(
            table.idle(&modules).expect("they match in time"),
            ["q_prjo", "^q_proj", r"layers\.1\..*"]
        );
    }
}
