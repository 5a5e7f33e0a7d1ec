//! `cox cache`: what is in a store of features, whether it is sound, and what can go.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use coxswain_feature_store::Store;
use coxswain_worker::train::CACHE_DIR;

use crate::{
    exit::{CliError, Exit, Outcome},
    render::{say, store},
};

/// Subcommands of `cox cache`.
#[derive(Debug, Subcommand)]
pub enum CacheCommand {
    /// List the cache's namespaces: tap, dtype, samples, bytes, last use, creator
    List(StoreArgs),
    /// Read every record and list the damaged ones; exits 3 if any remain damaged
    Verify(VerifyArgs),
    /// Remove shards of writers that died, unusable shards, and unused namespaces over a budget
    Gc(GcArgs),
}

/// Which store, and how to answer.
#[derive(Args, Debug)]
pub struct StoreArgs {
    /// Feature cache (`cache.dir`), or the output directory of a run that has its cache there
    #[arg(value_name = "DIR", default_value = ".")]
    dir: PathBuf,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// Flags of `cox cache verify`.
#[derive(Args, Debug)]
pub struct VerifyArgs {
    #[command(flatten)]
    store: StoreArgs,
    /// Rewrite shards without their damaged records; runs recompute these when needed
    #[arg(long)]
    repair: bool,
}

/// Flags of `cox cache gc`.
#[derive(Args, Debug)]
pub struct GcArgs {
    #[command(flatten)]
    store: StoreArgs,
    /// Byte budget of the cache, such as 500000, 20GiB or 1.5TB; without it no intact namespace is removed
    #[arg(long, value_name = "BYTES", value_parser = byte_count)]
    budget: Option<u64>,
    /// Say what would be removed, and remove nothing
    #[arg(long)]
    dry_run: bool,
}

/// Runs one of them.
pub fn execute(command: &CacheCommand) -> Outcome {
    match command {
        CacheCommand::List(args) => list(args),
        CacheCommand::Verify(args) => verify(args),
        CacheCommand::Gc(args) => gc(args),
    }
}

fn list(args: &StoreArgs) -> Outcome {
    let opened = args.open()?;
    let (namespaces, strange) = opened.list().map_err(CliError::bad_input)?;
    let whole = opened.bytes().map_err(CliError::bad_input)?;
    match args.json {
        true => say(format_args!("{:#}", store::list_json(opened.dir(), whole, &namespaces, &strange))),
        false => say(store::list(opened.dir(), whole, &namespaces, &strange)),
    };
    Ok(())
}

fn verify(args: &VerifyArgs) -> Outcome {
    let opened = args.store.open()?;
    let verified = opened.verify().map_err(CliError::bad_input)?;
    let repaired =
        if args.repair { opened.repair(&verified.damaged).map_err(CliError::bad_input)? } else { Vec::new() };
    match args.store.json {
        true => say(format_args!("{:#}", store::verified_json(&verified, &repaired))),
        false => say(store::verified(&verified, &repaired)),
    };
    let (damaged, unusable) = (verified.damaged.len(), verified.unusable.len());
    let left = if args.repair { 0 } else { damaged };
    let text = match (left, unusable) {
        (0, 0) => return Ok(()),
        (0, _) => format!("unusable files: {unusable}; `cox cache gc` removes those that cox wrote"),
        _ => format!(
            "damaged records or shards: {damaged}, unusable files: {unusable}; runs recompute what they need; \
             `cox cache verify --repair` rewrites the shards without the damaged records"
        ),
    };
    Err(CliError::bad_input(text))
}

fn gc(args: &GcArgs) -> Outcome {
    let opened = args.store.open()?;
    let collected = opened.gc(args.budget, args.dry_run).map_err(CliError::bad_input)?;
    let left = opened.bytes().map_err(CliError::bad_input)?;
    match args.store.json {
        true => say(format_args!("{:#}", store::collected_json(&collected, args.dry_run, left))),
        false => say(store::collected(&collected, args.dry_run, left)),
    };
    let passed = args.budget.filter(|budget| left > *budget && !args.dry_run);
    passed.map_or(Ok(()), |budget| {
        let text = format!("the cache still has {left} bytes (budget {budget}) because runs are using it");
        Err(CliError::new(Exit::NoProgress, text))
    })
}

impl StoreArgs {
    /// The store in the directory named, or in the `vl-cache` below it.
    fn open(&self) -> Result<Store, CliError> {
        for dir in [self.dir.clone(), self.dir.join(CACHE_DIR)] {
            if let Some(store) = Store::existing(&dir).map_err(CliError::bad_input)? {
                return Ok(store);
            }
        }
        Err(CliError::usage(format!(
            "{}: not a feature cache (no store.json there or in its {CACHE_DIR}); name a run's cache.dir or its output \
             directory",
            self.dir.display()
        )))
    }
}

/// `500000`, `20GiB`, `1.5 TB`: powers of 1024 with an `i`, of 1000 without.
fn byte_count(text: &str) -> Result<u64, String> {
    let bad = || format!("`{text}` is not a number of bytes such as 500000, 20GiB or 1.5TB");
    let split = text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let factor = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 1.0,
        "kb" => 1e3,
        "mb" => 1e6,
        "gb" => 1e9,
        "tb" => 1e12,
        "kib" => 1024.0,
        "mib" => 1024.0 * 1024.0,
        "gib" => 1024.0 * 1024.0 * 1024.0,
        "tib" => 1024.0 * 1024.0 * 1024.0 * 1024.0,
        _ => return Err(bad()),
    };
    let number: f64 = number.trim().parse().map_err(|_| bad())?;
    let bytes = number * factor;
    // Up to 2^53 every whole number of bytes is itself as f64.
    if (0.0..=9e15).contains(&bytes) { Ok(bytes.round() as u64) } else { Err(bad()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets_are_read_with_and_without_units() {
        for (text, bytes) in [
            ("0", 0),
            ("500000", 500_000),
            ("20GiB", 20 << 30),
            ("1.5 TB", 1_500_000_000_000),
            ("2kib", 2048),
        ] {
            assert_eq!(byte_count(text), Ok(bytes));
        }
        for text in ["", "GiB", "-1", "1e99", "3 parsecs", "NaN"] {
            assert!(byte_count(text).unwrap_err().contains("not a number of bytes"), "{text}");
        }
    }

    #[test]
    fn a_directory_without_a_store_is_refused_with_the_remedy() {
        let dir = tempfile::tempdir().unwrap();
        let args = StoreArgs { dir: dir.path().into(), json: false };
        let failed = args.open().unwrap_err();
        assert_eq!(failed.exit, Exit::Usage);
        assert!(failed.message.unwrap().contains("cache.dir"));
        Store::open(&dir.path().join("vl-cache"), None).unwrap();
        assert_eq!(args.open().unwrap().dir(), dir.path().join("vl-cache"));
    }
}
