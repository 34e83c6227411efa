//! What the pages for users say of tests and examples is so.

use std::fs;
use std::path::{Path, PathBuf};

#[test]
fn every_test_the_guarantees_name_exists() {
    let text = fs::read_to_string(root().join("docs/guarantees.md")).expect("the page");
    let names: Vec<&str> =
        text.split('`').skip(1).step_by(2).filter(|code| code.contains("::") && !code.contains(' ')).collect();
    assert!(names.len() > 25, "the page names its tests: {names:?}");
    for name in &names {
        let (module, function) = name.rsplit_once("::").expect("a path");
        let source = source_of(module).unwrap_or_else(|| panic!("{name}: there is no such module"));
        let source = fs::read_to_string(source).expect("a source file");
        let head = format!("async fn {function}(");
        let found = source
            .split("#[tokio::test")
            .skip(1)
            .filter_map(|rest| rest.split_once(']'))
            .any(|(_, rest)| rest.trim_start().starts_with(&head));
        assert!(found, "{name}: there is no such test");
    }
    for line in text.lines().filter(|line| line.starts_with("| ") && line.matches('|').count() == 6) {
        let named = ["`truth::", "`relay::", "`amqp::", "`keep::", "`isolation::", "| test |"]
            .iter()
            .any(|name| line.contains(name));
        assert!(named, "no test: {line}");
    }
}

#[test]
fn the_consumers_guide_quotes_the_example_that_is_tested() {
    let guide = fs::read_to_string(root().join("docs/consumers.md")).expect("the page");
    let example = fs::read_to_string(root().join("examples/consumers/consumer.py")).expect("the example");
    let quoted: Vec<&str> = guide.split("```python\n").skip(1).filter_map(|rest| rest.split("```").next()).collect();
    assert_eq!(quoted.len(), 2);
    for lines in quoted {
        assert!(example.contains(lines), "not in the example as it is:\n{lines}");
    }
    let links = guide.split("](../").skip(1).filter_map(|rest| rest.split(')').next());
    for link in links {
        assert!(root().join(link).exists(), "{link}");
    }
}

/// The file of a module of this test binary.
fn source_of(module: &str) -> Option<PathBuf> {
    let path = root().join("tests/it").join(module.replace("::", "/"));
    [path.with_extension("rs"), path.join("mod.rs")].into_iter().find(|path| path.exists())
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}
