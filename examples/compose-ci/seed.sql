-- The database as the test wants to find it.
create role shop login password 'test';
create schema shop authorization shop;
set role shop;
create table shop.orders (id int primary key, status text not null, total numeric not null);
insert into shop.orders values (1001, 'new', 42.00), (1002, 'new', 7.50), (1003, 'cancelled', 1.00);
