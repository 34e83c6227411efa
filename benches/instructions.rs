//! Instructions of the pure hot parts, counted by valgrind: the same on every run, whatever else the machine does.

use std::process::Command;

mod cases;

const TIMES: u64 = 1_000;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.as_slice() {
        [word, name, times] if word == "run" => {
            let times = times.parse().expect("a number");
            let (_, case) = cases::all().into_iter().find(|(known, _)| known == name).expect("a known case");
            (0..times).for_each(|_: u64| case());
        }
        // `cargo test` builds and runs benches to see that they do.
        _ if arguments.iter().any(|argument| argument == "--test") => cases::all().iter().for_each(|(_, case)| case()),
        _ => print_all(),
    }
}

fn print_all() {
    for (name, _) in cases::all() {
        match (collected(name, 0), collected(name, TIMES)) {
            (Some(none), Some(some)) => println!("{name:<24} {:>8} instructions", (some - none) / TIMES),
            _ => {
                return eprintln!(
                    "instructions are counted by valgrind, which is not installed: apt-get install valgrind"
                );
            }
        }
    }
}

/// All instructions of a process that does the case so often.
fn collected(name: &str, times: u64) -> Option<u64> {
    let myself = std::env::current_exe().ok()?;
    let mut valgrind = Command::new("valgrind");
    valgrind.args(["--tool=callgrind", "--callgrind-out-file=/dev/null"]).arg(myself).args([
        "run",
        name,
        &times.to_string(),
    ]);
    let output = valgrind.output().ok()?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    said.lines().find_map(|line| line.split_once("Collected :")?.1.trim().parse().ok())
}
