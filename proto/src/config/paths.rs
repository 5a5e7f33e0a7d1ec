//! Paths as shells write them: `~/` is the home directory where a run file, or an override that no shell has
//! expanded (`run.output_dir=~/runs/a`), says it. Variables are not expanded: what they were would be known
//! to nobody who reads the run's records.

use super::{
    error::{ConfigError, Problem},
    keys::join,
    tree::{Node, Value},
};

/// Keys whose values are paths, or lists and maps of paths.
const KEYS: [&str; 6] = ["path", "dir", "output_dir", "images", "init_from", "backbone"];

/// Expands every path of the tree; `home` is the home directory, if there is one.
pub(super) fn expand(root: &mut Node, home: Option<&str>) -> Result<(), ConfigError> {
    walk(root, "", false, home).map_err(ConfigError::one)
}

fn walk(node: &mut Node, path: &str, is_path: bool, home: Option<&str>) -> Result<(), Problem> {
    let place = node.place.clone();
    match &mut node.value {
        Value::Scalar { text, .. } if is_path => {
            *text = expanded(text, home).map_err(|(message, help)| {
                Problem::new(path, format!("`{text}` {message}")).at(&place).help(help)
            })?;
            Ok(())
        }
        Value::Scalar { .. } => Ok(()),
        Value::List(items) => {
            let mut items = items.iter_mut().enumerate();
            items.try_for_each(|(at, item)| walk(item, &join(path, &at.to_string()), is_path, home))
        }
        Value::Map(entries) => entries.iter_mut().try_for_each(|(key, child)| {
            let is_path = is_path || KEYS.contains(&key.text.as_str());
            walk(child, &join(path, &key.text), is_path, home)
        }),
    }
}

/// The path, or what is wrong with it and what to do.
fn expanded(text: &str, home: Option<&str>) -> Result<String, (&'static str, &'static str)> {
    let names_variable = |part: &str| {
        let name = part.strip_prefix('$').map(|name| name.trim_start_matches('{'));
        name.is_some_and(|name| name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_'))
    };
    if text.split('/').any(names_variable) {
        return Err((
            "has a variable in it, but variables are not expanded here",
            "write the path out, or let a shell expand it in an override: \"KEY=$HOME/a\"",
        ));
    }
    let Some(rest) = text.strip_prefix('~').filter(|rest| !text.contains("://") && !rest.is_empty()) else {
        return Ok(text.to_owned());
    };
    match (rest.strip_prefix('/'), home) {
        (Some(rest), Some(home)) => Ok(format!("{}/{rest}", home.trim_end_matches('/'))),
        (Some(_), None) => Err(("begins with `~`, but HOME is not set", "write the path out")),
        (None, _) => Err(("begins with `~`, but only `~/` is supported", "write the path out, or `./~NAME`")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tree::parse;

    fn of(text: &str, home: Option<&str>) -> Result<String, String> {
        let mut root = parse(text, "run.yaml").unwrap();
        expand(&mut root, home).map_err(|error| error.to_string())?;
        let Value::Scalar { text, .. } = &root.nearest("run.output_dir").value else { panic!("{root:?}") };
        Ok(text.clone())
    }

    #[test]
    fn a_path_may_begin_with_the_home_directory() {
        let home = Some("/home/ada");
        assert_eq!(of("run: {output_dir: ~/runs/a}", home).unwrap(), "/home/ada/runs/a");
        assert_eq!(of("run: {output_dir: runs/~a}", home).unwrap(), "runs/~a");
        assert_eq!(of("run: {output_dir: 'a$1/b'}", home).unwrap(), "a$1/b");
        let nowhere = of("run: {output_dir: ~/runs/a}", None).unwrap_err();
        assert!(nowhere.starts_with("run.yaml:1:19: run.output_dir: `~/runs/a` begins with"), "{nowhere}");
        let other = of("run: {output_dir: ~ada/runs}", home).unwrap_err();
        assert!(other.contains("only `~/` is supported"), "{other}");
    }

    #[test]
    fn a_variable_is_refused_by_name_and_only_in_paths() {
        for text in ["$HOME/a", "${HOME}/a", "/data/$USER"] {
            let told = of(&format!("run: {{output_dir: '{text}'}}"), None).unwrap_err();
            assert!(told.contains(&format!("`{text}` has a variable in it")), "{told}");
        }
        let mut root = parse("{lora: {targets: '~/$X'}, train: {init_from: {lora: ~/a}}}", "r").unwrap();
        expand(&mut root, Some("/h")).unwrap();
        let text = |path: &str| match &root.nearest(path).value {
            Value::Scalar { text, .. } => text.clone(),
            other => panic!("{other:?}"),
        };
        assert_eq!((text("lora.targets"), text("train.init_from.lora")), ("~/$X".into(), "/h/a".into()));
    }
}
