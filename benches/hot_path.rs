//! Times of the pure hot parts. They vary with the machine; `instructions` does not.

use criterion::{Criterion, criterion_group, criterion_main};

mod cases;

fn hot_path(criterion: &mut Criterion) {
    for (name, case) in cases::all() {
        criterion.bench_function(name, |b| b.iter(&case));
    }
}

criterion_group!(benches, hot_path);
criterion_main!(benches);
