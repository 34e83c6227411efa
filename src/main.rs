//! The binary: arguments in, exit code out.

use std::process::ExitCode;

use fencepost::cli::{self, Cli};

// Every delivery is made of many small pieces that live until it is settled, on another thread than they began
// (docs/performance.md).
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    let cli = Cli::read();
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("fencepost: cannot start: {error}");
            return ExitCode::FAILURE;
        }
    };
    match runtime.block_on(cli.run()) {
        Ok(exit) => exit.into(),
        Err(error) => {
            eprintln!("fencepost: {}", cli::logging::report(error.as_ref()));
            cli::exit_code_of(&error)
        }
    }
}
